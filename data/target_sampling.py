"""How y* is sampled: the settings, and a seed of its own for every prompt."""

from __future__ import annotations

import hashlib

from jacobi_llm.configs.schema import CollectConfig
from jacobi_llm.infer.sampling_params import SamplingParams


def target_sampling(config: CollectConfig) -> SamplingParams:
    """How the tokens of y* are chosen.

    Raises:
        UsageError: settings that do not go together.
    """
    return SamplingParams(temperature=config.temperature, top_k=config.top_k, top_p=config.top_p, min_p=config.min_p)


def noise_seed(seed: int, source_index: int) -> int:
    """Seed of the sampling noise of one completion, 64 bits; with one seed for all, all would meet the same noise."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{source_index}/noise".encode()).digest()[:8], "big")
