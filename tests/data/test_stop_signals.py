"""The first signal is noted, the second one stops."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jacobi_llm.data.stop_signals import StopSignals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_stops_at_once(number: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    told: list[int] = []
    signals = StopSignals(lambda: told.append(1))
    with signals.kept():
        assert not signals.is_set
        os.kill(os.getpid(), number)
        assert signals.is_set
        assert told == [1]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        assert told == [1]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert capsys.readouterr().err.count("stopping after the shard in hand") == 1


def test_a_worker_leaves_the_terminals_interrupt_to_its_parent(capsys: pytest.CaptureFixture[str]) -> None:
    signals = StopSignals()
    with signals.kept(of_terminal=False):
        os.kill(os.getpid(), signal.SIGINT)
        assert not signals.is_set
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.is_set
    assert capsys.readouterr().err == ""


def test_other_threads_change_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def body() -> None:
        with StopSignals().kept():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [before]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_ended_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    argv = ["prompts", "--input", "-", "--output", str(tmp_path / "out.jsonl")]
    code = f"import sys; sys.argv[1:] = {argv}; from jacobi_llm.data.cli import main; main()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        while not list(tmp_path.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert told.decode().splitlines() == ["interrupted"]
    assert not list(tmp_path.iterdir())
