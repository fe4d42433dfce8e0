"""What the bar says of shards that were there before, and of those that come."""

from __future__ import annotations

import sys
from io import StringIO

import pytest

from jacobi_llm.data.progress import Progress
from jacobi_llm.data.stop_signals import StopSignals
from jacobi_llm.data.store import Manifest, Shard, shard_name


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def shard(number: int, num_tokens: int) -> Shard:
    return Shard(shard_name(number), 4, "", {"why": [1]}, 0, num_tokens, num_tokens // 2)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    for name in ("time.time", "tqdm.std.time"):
        monkeypatch.setattr(name, lambda: now[0])
    return now


def test_rates_count_what_is_new_and_totals_count_all(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with Progress(18, 5, StopSignals()) as progress:
        clock[0] += 60  # the model is loaded
        progress.opened(Manifest({}, {}, 4, {3: shard(3, 1000)}))
        clock[0] += 10
        progress.finished(0, shard(0, 500))
    last = screen.getvalue().replace("\r", "\n").strip().splitlines()[-1]
    assert "8/18" in last  # the last shard has three prompts
    assert "50 tokens/s, TPF 2.00, 2 skipped" in last
    assert "00:10<00:20" in last  # five prompts in ten seconds, ten to come


def test_nothing_is_drawn_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(10, 5, StopSignals()) as progress:
        progress.opened(Manifest({}, {}, 2))
        progress.finished(0, shard(0, 500))
    assert capsys.readouterr().err == ""
    assert progress.num_finished == 1
