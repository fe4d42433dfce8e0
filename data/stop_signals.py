"""SIGINT and SIGTERM: the first one ends the work after the shard in hand, the second at once."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class StopSignals:
    """Whether a signal has asked to stop.

    Attributes:
        is_set: a signal has come.
        on_first: called by the first signal; None does nothing.
    """

    def __init__(self, on_first: Callable[[], None] | None = None) -> None:
        self.is_set = False
        self.on_first = on_first

    @contextmanager
    def kept(self, *, of_terminal: bool = True) -> Iterator[None]:
        """Within the block signals are noted. Outside the main thread, where Python has no signals, nothing changes.

        Args:
            of_terminal: False for a process that another one stops: it says nothing, and leaves SIGINT, which a
                terminal sends to all processes, to that one.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, _: FrameType | None) -> None:
            if self.is_set:
                raise KeyboardInterrupt
            self.is_set = True
            if of_terminal:
                print("stopping after the shard in hand; once more stops at once", file=sys.stderr, flush=True)
            if self.on_first is not None:
                self.on_first()

        wanted = {signal.SIGINT: note if of_terminal else signal.SIG_IGN, signal.SIGTERM: note}
        handlers = {number: signal.signal(number, handler) for number, handler in wanted.items()}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
