"""How a collection goes, on standard error: rate, time left, TPF so far, skipped prompts."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from tqdm import tqdm

from jacobi_llm.data.stop_signals import StopSignals
from jacobi_llm.data.store import Manifest, Shard


class Progress:
    """A bar over the prompts of a set; nothing is drawn where standard error is no terminal.

    Attributes:
        num_finished: shards collected since the start.
    """

    def __init__(self, num_prompts: int, shard_size: int, signals: StopSignals) -> None:
        self.num_finished = 0
        self._signals = signals
        self._num_prompts = num_prompts
        self._shard_size = shard_size
        self._shards: dict[int, Shard] = {}
        self._num_new_tokens = 0
        self._started_s = time.time()
        self._bar = tqdm(total=num_prompts, desc="collect", unit="prompt", file=sys.stderr, disable=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    @property
    def wants_stop(self) -> bool:
        return self._signals.is_set

    def opened(self, manifest: Manifest) -> None:
        self._shards.update(manifest.shards)
        self._bar.n = sum(self._size_of(number) for number in self._shards)
        if not self.num_finished:
            # What was there before is not counted into the rates, nor is the time that loading the model took.
            self._bar.initial = self._bar.last_print_n = self._bar.n
            self._bar.unpause()
            self._started_s = time.time()
        self._bar.refresh()

    def finished(self, number: int, shard: Shard) -> None:
        self.num_finished += 1
        self._shards[number] = shard
        # Of all workers together, from the first open set on.
        self._num_new_tokens += shard.num_completion_tokens
        rate = self._num_new_tokens / max(time.time() - self._started_s, 1e-9)
        num_tokens = sum(one.num_completion_tokens for one in self._shards.values())
        num_passes = sum(one.num_block_passes for one in self._shards.values())
        num_skipped = sum(len(indices) for one in self._shards.values() for indices in one.skipped.values())
        self._bar.set_postfix_str(
            f"{rate:.0f} tokens/s, TPF {num_tokens / max(num_passes, 1):.2f}, {num_skipped} skipped",
            refresh=False,
        )
        self._bar.update(self._size_of(number))

    def _size_of(self, number: int) -> int:
        return min(self._shard_size, self._num_prompts - number * self._shard_size)
