"""Several processes of this machine collect one set: started here, stopped with this process, and no more than that."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from jacobi_llm.configs.errors import JacobiError, RunError, UsageError
from jacobi_llm.configs.schema import Recipe
from jacobi_llm.data.collection import Collection
from jacobi_llm.data.progress import Progress
from jacobi_llm.data.ranks import Ranks
from jacobi_llm.data.sources import PromptSet
from jacobi_llm.data.stop_signals import StopSignals
from jacobi_llm.data.store import MANIFEST, Manifest, Shard, close_set

_POLL_S = 0.5


def run_workers(recipe: Recipe, found: PromptSet, ranks: Ranks, signals: StopSignals, progress: Progress) -> Manifest:
    """Start ``collect.num_workers`` processes and wait for them.

    Each loads the model, opens the set and collects shards, as a process alone does. One that dies costs no shard: the
    others take what it leaves, or the next run does.

    Returns:
        The manifest, complete unless something stopped the workers, or others outside still collect.

    Raises:
        UsageError, RunError: what the first worker that failed says; the others have then been stopped.
    """
    recipe = recipe.model_copy(deep=True)
    if not recipe.engine.num_threads:
        recipe.engine.num_threads = max(1, len(os.sched_getaffinity(0)) // recipe.collect.num_workers)
    context = multiprocessing.get_context("spawn")
    crew = _Crew(progress)
    signals.on_first = crew.ask_to_stop
    try:
        for number in range(recipe.collect.num_workers):
            ours, theirs = context.Pipe()
            worker = ranks.worker(number, recipe.collect.num_workers)
            process = context.Process(target=_work, args=(recipe, found, worker, theirs), name=f"worker {number}")
            process.start()
            theirs.close()
            crew.add(process, ours)
        crew.wait()
    finally:
        crew.kill()
    folder = Path(recipe.collect.output).expanduser()
    is_begun = (folder / MANIFEST).exists()
    if signals.is_set and not is_begun:
        raise KeyboardInterrupt
    manifest = close_set(folder) if is_begun else None
    if manifest is None or not (manifest.is_complete or signals.is_set or not crew.deaths):
        raise RunError([f"{death}; run the same command again to go on" for death in crew.deaths])
    for death in crew.deaths:
        print(f"warning: {death}", file=sys.stderr)
    return manifest


class _Crew:
    """The worker processes and what they tell: a finished shard, or why they failed."""

    def __init__(self, progress: Progress) -> None:
        self.deaths: list[str] = []
        self._progress = progress
        self._processes: dict[Connection, BaseProcess] = {}
        self._failure: JacobiError | None = None

    def add(self, process: BaseProcess, connection: Connection) -> None:
        self._processes[connection] = process

    def wait(self) -> None:
        """Until all have ended.

        Raises:
            JacobiError: the first failure that one told.
        """
        while self._processes:
            for connection in wait(list(self._processes), timeout=_POLL_S):
                assert isinstance(connection, Connection), "nothing else is waited for"
                try:
                    self._hear(connection.recv())
                except (EOFError, OSError):
                    self._bury(self._processes.pop(connection))
        if self._failure is not None:
            raise self._failure

    def ask_to_stop(self) -> None:
        """Let each finish the shard in hand."""
        for process in self._processes.values():
            process.terminate()

    def kill(self) -> None:
        """End what is left at once."""
        for process in self._processes.values():
            process.kill()
            process.join()

    def _hear(self, message: tuple[str, Any]) -> None:
        kind, content = message
        match kind:
            case "opened":
                self._progress.opened(content)
            case "finished":
                self._progress.finished(*content)
            case _:
                is_usage, faults = content
                if self._failure is None:
                    self._failure = (UsageError if is_usage else RunError)(faults)
                    self.ask_to_stop()

    def _bury(self, process: BaseProcess) -> None:
        process.join()
        if process.exitcode:
            how = f"killed by signal {-process.exitcode}" if process.exitcode < 0 else f"exit code {process.exitcode}"
            self.deaths.append(f"{process.name}: {how}")


class _Messenger:
    """What a worker watches its work with: everything goes to the process that started it."""

    def __init__(self, connection: Connection, signals: StopSignals) -> None:
        self._connection = connection
        self._signals = signals

    @property
    def wants_stop(self) -> bool:
        return self._signals.is_set

    def opened(self, manifest: Manifest) -> None:
        self._connection.send(("opened", manifest))

    def finished(self, number: int, shard: Shard) -> None:
        self._connection.send(("finished", (number, shard)))


def _work(recipe: Recipe, found: PromptSet, ranks: Ranks, connection: Connection) -> None:
    """Body of a worker process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signals = StopSignals()
    # The terminal sends its interrupt to all processes; the parent alone decides, and passes a stop on.
    with signals.kept(of_terminal=False):
        try:
            Collection(recipe, found, ranks).work(_Messenger(connection, signals))
        except JacobiError as error:
            connection.send(("failed", (isinstance(error, UsageError), error.faults)))
        finally:
            connection.close()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    # As the command itself ends: C++ threads may outlive what they need.
    os._exit(0)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
