"""An engine in a process of its own that sleeps whenever it is not asked.

An idle engine may still burn a core: OpenMP threads spin for a while after a region, an engine process polls its
queue. So a worker's whole process group is stopped (SIGSTOP) between its turns, and what it nevertheless uses is
counted.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from benchmarks.peers.cpu_clock import family_cpu_s
from jacobi_llm.configs.errors import RunError

LOAD_TIMEOUT_S = 900.0
REPLY_TIMEOUT_S = 600.0
_END_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 20.0
_NUM_LOG_LINES = 15


class Worker:
    """One engine; asleep after construction and outside of ``awake`` blocks.

    Args:
        name: for messages.
        command: starts the worker (see ``protocol``).
        environment: all its variables.
        folder: its working folder.

    Attributes:
        ready: what the engine said of itself: ``version``, ``settings``, ``load_s``.
        idle_cpu_s: CPU seconds that its processes used while they should have slept.

    Raises:
        RunError: the engine cannot be started; the message holds the end of its log.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self.name = name
        self.idle_cpu_s = 0.0
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        # A group of its own, in this session: should the comparison be killed, the kernel hangs up on stopped groups.
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            encoding="utf-8",
            process_group=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._commands, self._replies = self._process.stdin, self._process.stdout
        try:
            self.ready: dict[str, Any] = self._reply(LOAD_TIMEOUT_S)["ready"]
        except BaseException:
            self.close()
            raise
        self._fall_asleep()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let the engine run inside the block."""
        self.idle_cpu_s += family_cpu_s(self._process.pid) - self._cpu_s_at_sleep
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._fall_asleep()

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send one command to the engine, which must be awake, and return its answer.

        Raises:
            RunError: it failed, ended, or does not answer; the message holds the end of its log.
        """
        try:
            self._commands.write(json.dumps({"command": command, **arguments}) + "\n")
            self._commands.flush()
        except BrokenPipeError:
            raise self._end() from None
        return self._reply(REPLY_TIMEOUT_S)

    def cpu_s(self) -> float:
        """CPU seconds of its live processes."""
        return family_cpu_s(self._process.pid)

    def close(self) -> None:
        """End the engine and all processes of its group; a second call does nothing."""
        if self._replies.closed:
            # Its number may be that of another process by now.
            return
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self._commands.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_TIMEOUT_S)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._replies.close()
        self._log.close()

    def _reply(self, timeout_s: float) -> dict[str, Any]:
        if not select.select([self._replies], [], [], timeout_s)[0]:
            raise self._failure(f"has not answered for {timeout_s:.0f} s")
        line = self._replies.readline()
        if not line:
            raise self._end()
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise self._failure(f"failed: {reply['error']}")
        return reply

    def _fall_asleep(self) -> None:
        # A signal takes its time on a busy machine, and the next turn must not begin before.
        deadline_s = time.monotonic() + _STOP_TIMEOUT_S
        while not self._is_stopped_or_ended():
            if time.monotonic() > deadline_s:
                raise self._failure("cannot be stopped")
            self._signal(signal.SIGSTOP)
            time.sleep(0.001)
        self._cpu_s_at_sleep = family_cpu_s(self._process.pid)

    def _is_stopped_or_ended(self) -> bool:
        if self._process.returncode is not None:
            return True  # it was waited for, and has no state left to ask for
        flags = os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG
        return os.waitid(os.P_PID, self._process.pid, flags) is not None

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _end(self) -> RunError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_TIMEOUT_S)
        return self._failure(f"ended with status {self._process.returncode}")

    def _failure(self, what: str) -> RunError:
        self._log.seek(0)
        last_lines = self._log.read().splitlines()[-_NUM_LOG_LINES:]
        return RunError([f"{self.name}: the engine {what}; the end of its log:", *last_lines])
