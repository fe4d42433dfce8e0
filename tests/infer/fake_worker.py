"""A worker without an engine, for tests of the comparison: python -m tests.infer.fake_worker --variant ..."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import Flags, Served, TokenIds, read_flags, serve
from benchmarks.peers.worker import Worker

ROOT = Path(__file__).parents[2]
VARIANTS = ("plain", "spinning", "wrong", "short", "broken")


def fake(variant: str = "plain", name: str = "fake") -> Worker:
    """Start one."""
    flags = Flags("no-model", variant, 1, 4, 64)
    command = [sys.executable, "-m", "tests.infer.fake_worker", *flags.as_arguments()]
    return Worker(f"{name}:{variant}", command, dict(os.environ), ROOT)


def completion(prompt: list[int], max_tokens: int) -> list[int]:
    """What the right engines answer: some function of the prompt."""
    return [(sum(prompt) + 7 * index) % 256 for index in range(max_tokens)]


def load(flags: Flags) -> Served:
    print("a library that prints on standard output")
    os.system("echo a child that does so too")
    if flags.variant == "broken":
        raise OSError("no such weights\nand more of it")
    if flags.variant == "spinning":
        threading.Thread(target=_spin, daemon=True).start()

    def decode(prompts: TokenIds, max_tokens: int) -> TokenIds:
        print("decoding")
        answers = [completion(prompt, max_tokens - (flags.variant == "short")) for prompt in prompts]
        if flags.variant == "wrong" and max_tokens > 4:
            answers[-1][4] = (answers[-1][4] + 1) % 256
        return answers

    def time_rows(num_rows: int, context: int, repeats: int) -> dict[str, Any]:
        return {"one_row_ms": [2.0] * repeats, "many_rows_ms": [3.0] * repeats}

    def end() -> dict[str, Any]:
        os._exit(3)

    return Served("1.2.3", {"variant": flags.variant}, decode, {"time_rows": time_rows, "end": end})


def _spin() -> None:
    while True:
        pass


if __name__ == "__main__":
    flags = read_flags(VARIANTS)
    serve(lambda: load(flags))
