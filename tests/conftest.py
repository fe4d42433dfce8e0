"""Shared by all tests: one thread, and factories of tiny models."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

# Read when torch is imported, so set before; children that a test starts inherit it.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from hypothesis import HealthCheck, settings
from transformers import PreTrainedModel

from jacobi_llm.infer import calibration
from jacobi_llm.infer.models import LoadedModel
from tests import tiny_models

torch.set_num_threads(1)

settings.register_profile(
    "suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("suite")


# Tiny models are measured in no time, and their times do not belong into anybody's cache.
calibration.MOST_SECONDS = 0.2
calibration.LEAST_CACHED_SECONDS = float("inf")


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    """Return the factory ``tiny_model(family, dtype, *, seed, **config) -> PreTrainedModel``."""
    return tiny_models.tiny_model


@pytest.fixture(scope="session")
def tiny_loaded() -> Callable[..., LoadedModel]:
    """Return the factory ``tiny_loaded(family, dtype, *, seed, **config) -> LoadedModel``."""
    return tiny_models.tiny_loaded


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny float32 llama and its tokenizer. Shared by all tests: read it, never write to it."""
    return tiny_models.save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny-llama")
