"""Our engine as a worker: plain decoding, window 1."""

from __future__ import annotations

import time
from typing import Any

import jacobi_llm
from benchmarks.peers.protocol import Flags, Served, TokenIds, read_flags, serve
from jacobi_llm.configs.schema import Dtype, EngineConfig
from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.models import load_model
from jacobi_llm.infer.request import DecodeParams, Request
from jacobi_llm.infer.row_group import RowGroup

VARIANTS = ("default",)


def load(flags: Flags) -> Served:
    """Load the model in bf16."""
    config = EngineConfig(num_threads=flags.num_threads, prefix_sharing=False)
    engine = LLMEngine(load_model(flags.model, dtype=Dtype.BFLOAT16), config)

    def decode(prompts: TokenIds, max_tokens: int) -> TokenIds:
        params = DecodeParams(max_tokens, window=1)
        rows_before = engine.runner.num_rows
        requests = [Request(str(index), tuple(ids), params) for index, ids in enumerate(prompts)]
        outputs = engine.generate(requests)
        num_rows = sum(len(ids) + max_tokens - 1 for ids in prompts)
        if engine.runner.num_rows - rows_before != num_rows:
            # A shared prefix or a preemption: then the peers, which have neither, would be doing other work.
            raise RuntimeError(f"{engine.runner.num_rows - rows_before} rows were forwarded, not {num_rows}")
        return [list(output.token_ids) for output in outputs]

    def time_rows(num_rows: int, context: int, repeats: int) -> dict[str, Any]:
        return time_passes(engine, num_rows, context, repeats)

    settings = {"dtype": Dtype.BFLOAT16.value, "window": 1, "threads": flags.num_threads}
    return Served(jacobi_llm.__version__, settings, decode, {"time_rows": time_rows})


def time_passes(engine: LLMEngine, num_rows: int, context: int, repeats: int) -> dict[str, Any]:
    """Time passes of 1 row and of ``num_rows`` rows of one request, in turn.

    Args:
        engine: idle; it is left idle.
        num_rows: rows of the wide pass; all of them get logits, as in a window.
        context: tokens with K/V before them.
        repeats: pairs of passes.

    Returns:
        ``one_row_ms`` and ``many_rows_ms``, in the order of the pairs.
    """
    block_table: list[int] = []
    if not engine.pool.grow(block_table, context + num_rows):
        raise RuntimeError(f"{context + num_rows} tokens do not fit the K/V pages")
    token_ids = [index % engine.vocab_size for index in range(100, 100 + context + num_rows)]
    engine.runner.forward([RowGroup(block_table, 0, token_ids[:context])])
    one = RowGroup(block_table, context, token_ids[context : context + 1])
    many = RowGroup(block_table, context, token_ids[context:], num_logit_rows=num_rows)
    times_ms: dict[int, list[float]] = {1: [], num_rows: []}
    for repeat in range(-_WARM_UP_PAIRS, repeats):
        for group in (one, many) if repeat % 2 == 0 else (many, one):
            start_s = time.perf_counter()
            engine.runner.forward([group])
            if repeat >= 0:
                times_ms[group.num_rows].append((time.perf_counter() - start_s) * 1e3)
    engine.pool.release(block_table)
    return {"one_row_ms": times_ms[1], "many_rows_ms": times_ms[num_rows]}


_WARM_UP_PAIRS = 5

if __name__ == "__main__":
    flags = read_flags(VARIANTS)
    serve(lambda: load(flags))
