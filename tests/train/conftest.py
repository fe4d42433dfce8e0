"""What the trainer's tests share: one small trajectory set per session, and one unbroken run to compare with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.runs import UNBROKEN_STEPS, make_trajectories, settings_for, train, write_set


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a set of 26 made-up trajectories of window 8; read it, never write to it."""
    return write_set(tmp_path_factory.mktemp("set") / "data", make_trajectories())


@pytest.fixture(scope="session")
def unbroken(tiny_checkpoint: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run folder of ``UNBROKEN_STEPS`` updates without ZeRO in float32; read it, never write to it."""
    output = tmp_path_factory.mktemp("unbroken") / "run"
    assert train(settings_for(tiny_checkpoint, data, output, train__max_steps=UNBROKEN_STEPS)) == 0
    return output
