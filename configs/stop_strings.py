"""The bounds of stop strings, looked at where they are typed and again where a request is made."""

from __future__ import annotations

from collections.abc import Sequence

# OpenAI's API takes 4. The bounds keep the work per character and the memory of a request small.
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024


def stop_string_faults(strings: Sequence[str]) -> list[str]:
    """What is wrong with the stop strings of one request, one line for each fault; empty when nothing is."""
    faults = []
    if not all(strings):
        faults.append("empty string, which would end every answer at once; give at least one character")
    if len(strings) > MAX_STOP_STRINGS:
        faults.append(f"{len(strings)} strings; give at most {MAX_STOP_STRINGS}")
    longest = max(map(len, strings), default=0)
    if longest > MAX_STOP_STRING_CHARS:
        faults.append(f"a string of {longest} characters; give at most {MAX_STOP_STRING_CHARS}")
    return faults
