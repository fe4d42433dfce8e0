"""Words of messages."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """A number with its noun, as ``1 prompt`` or ``1,204 prompts``."""
    return f"{count:,} {noun if count == 1 else noun + 's'}"
