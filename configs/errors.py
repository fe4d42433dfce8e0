"""The errors a person sees: one line each, with file, key or flag, the value, and the remedy.

Exit codes follow the kind: 2 for usage (a wrong flag, key or path that can be mended before the run), 1 for a run
that failed, 130 for an interrupt. A traceback appears only with ``--debug``.
"""

from __future__ import annotations

from collections.abc import Sequence


class JacobiError(Exception):
    """Base of every error that is reported as plain lines, without a traceback.

    Attributes:
        faults: one line for each fault found; all of them are reported at once.
        exit_code: the process exit status.
    """

    exit_code = 1

    def __init__(self, faults: str | Sequence[str]) -> None:
        self.faults: list[str] = [faults] if isinstance(faults, str) else list(faults)
        super().__init__("\n".join(self.faults))


class UsageError(JacobiError):
    """The request itself is wrong: an unknown key, a bad value, a missing file."""

    exit_code = 2


class RunError(JacobiError):
    """The request is right, but the run failed: a damaged shard, a NaN loss, a full disk."""

    exit_code = 1


class QueueFullError(JacobiError):
    """The request is right, but as many as may wait are waiting already: try again later, or raise the limit."""

    exit_code = 1


class AbortedError(JacobiError):
    """The request was aborted by another than the one who waits for its output."""

    exit_code = 1
