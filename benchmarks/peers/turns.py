"""Taking turns: warm-up, choice of a peer's settings, pairs. One engine runs at a time; all the others are stopped."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence

from benchmarks.peers.cpu_clock import machine_cpu_s
from benchmarks.peers.pairs import Pair, Prompts, Turn, distinct_batches, plan, prompts_of
from benchmarks.peers.worker import Worker
from jacobi_llm.configs.errors import RunError

TRIALS = 3
_WAKING_TOKENS = 4


def take_turn(worker: Worker, prompts: Prompts, max_tokens: int) -> Turn:
    """Let one engine decode one batch.

    Raises:
        RunError: it fails, or returns other than ``max_tokens`` tokens for each prompt.
    """
    batch = [list(ids) for ids in prompts]
    with worker.awake():
        # The others have used the caches since its last turn; the clock starts when its weights have passed once.
        worker.ask("generate", prompts=batch, max_tokens=min(_WAKING_TOKENS, max_tokens))
        own_s, machine_s = worker.cpu_s(), machine_cpu_s()
        reply = worker.ask("generate", prompts=batch, max_tokens=max_tokens)
        own_s, machine_s = worker.cpu_s() - own_s, machine_cpu_s() - machine_s
    token_ids = tuple(map(tuple, reply["token_ids"]))
    if [len(ids) for ids in token_ids] != [max_tokens] * len(prompts):
        raise RunError(f"{worker.name}: {[len(ids) for ids in token_ids]} tokens, asked for {max_tokens} per prompt")
    return Turn(reply["wall_s"], own_s, max(machine_s - own_s, 0.0), token_ids)


def warm_up(
    workers: Sequence[Worker], batch_sizes: Sequence[int], repeats: int, prompts: Prompts, max_tokens: int
) -> None:
    """Run every batch that the repeats will use once on every engine, at full length: no shape is new later."""
    for worker in workers:
        for batch_size in batch_sizes:
            for batch in distinct_batches(batch_size, repeats, prompts):
                turn = take_turn(worker, batch, max_tokens)
            say(f"warm-up: {worker.name}, batch {batch_size}: {turn.tps:.1f} tokens/s")


def run_trials(
    workers: Mapping[str, Worker], batch_sizes: Sequence[int], prompts: Prompts, max_tokens: int
) -> dict[str, dict[int, float]]:
    """Measure the variants of one peer in turn.

    Args:
        workers: by variant.
        batch_sizes, prompts, max_tokens: of the comparison.

    Returns:
        Median tokens/s by variant and batch size, over ``TRIALS`` runs of the first batch after one warm-up.
    """
    tps: dict[str, dict[int, list[float]]] = {variant: {size: [] for size in batch_sizes} for variant in workers}
    for trial in range(TRIALS + 1):
        for batch_size in batch_sizes:
            for variant, worker in workers.items():
                turn = take_turn(worker, prompts_of(batch_size, 0, prompts), max_tokens)
                if trial > 0:
                    tps[variant][batch_size].append(turn.tps)
                    say(f"trial {trial} of {TRIALS}: {worker.name}, batch {batch_size}: {turn.tps:.1f} tokens/s")
    return {
        variant: {size: statistics.median(found) for size, found in by_size.items()} for variant, by_size in tps.items()
    }


def fastest(trials: Mapping[str, Mapping[int, float]]) -> str:
    """The variant with the largest geometric mean of its speeds over the batch sizes."""
    return max(trials, key=lambda variant: statistics.geometric_mean(trials[variant].values()))


def run_pairs(
    ours: Worker,
    peers: Mapping[str, Worker],
    batch_sizes: Sequence[int],
    repeats: int,
    prompts: Prompts,
    max_tokens: int,
) -> dict[Pair, tuple[Turn, Turn]]:
    """Run the whole plan; return (our turn, the peer's turn) by pair."""
    done: dict[Pair, tuple[Turn, Turn]] = {}
    for pair in plan(list(peers), batch_sizes, repeats):
        batch = prompts_of(pair.batch_size, pair.repeat, prompts)
        order = [ours, peers[pair.peer]] if pair.ours_first else [peers[pair.peer], ours]
        turns = {worker.name: take_turn(worker, batch, max_tokens) for worker in order}
        mine, other = turns[ours.name], turns[peers[pair.peer].name]
        done[pair] = mine, other
        say(
            f"repeat {pair.repeat + 1} of {repeats}, batch {pair.batch_size}: {ours.name} {mine.tps:.1f}, "
            f"{peers[pair.peer].name} {other.tps:.1f} tokens/s, ratio {mine.tps / other.tps:.3f}"
        )
    return done


def say(line: str) -> None:
    """Note progress on standard error."""
    print(line, file=sys.stderr, flush=True)
