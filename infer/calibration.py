"""Measures what passes cost on this machine, with this model, and keeps it in the user's cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import jacobi_llm
from jacobi_llm.configs.errors import RunError
from jacobi_llm.configs.files import write_atomically
from jacobi_llm.configs.schema import EngineConfig
from jacobi_llm.infer.cost_model import PassTimes
from jacobi_llm.infer.embedded import cache_dir
from jacobi_llm.infer.environment import cpu_model
from jacobi_llm.infer.kv_pages import PagePool
from jacobi_llm.infer.model_runner import ModelRunner
from jacobi_llm.infer.row_group import RowGroup
from jacobi_llm.infer.sampler import greedy_ids

# Kernels take 16 rows at a time: a seventeenth costs more than the eighteenth. Others take 6, and are slow with 1 or 2.
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 17, 24, 32, 33, 48, 64, 96, 128, 192, 256)
CONTEXT_TOKENS = 64
LONG_CONTEXT_TOKENS = 512
NUM_REQUESTS = 8
# Of each of several requests.
LONG_SHARED_CONTEXT_TOKENS = 256
MOST_SECONDS = 8.0
MOST_SWEEPS = 9
LEAST_TOLD_SECONDS = 0.5
# A calibration that takes less is not worth a file.
LEAST_CACHED_SECONDS = 1.0
FOLDER = "pass_times"

# Settings that change which requests fit, not what a pass costs.
_FREE_SETTINGS = frozenset(("kv_memory_mib", "max_num_seqs", "max_num_rows", "num_threads"))


def pass_times(runner: ModelRunner, pool: PagePool, config: EngineConfig) -> PassTimes:
    """Times of this model on this machine: those of an earlier run, or measured now (seconds, said on stderr).

    Args:
        runner: idle.
        pool: has a few free pages; they are free again afterwards.
        config: of the engine.
    """
    path = cache_dir() / FOLDER / f"{_key(runner, config)}.json"
    known = _read(path)
    if known is not None and known.num_rows[-1] <= config.max_num_rows:
        return known
    started_s = time.perf_counter()
    times = calibrate(runner, pool, config.max_num_rows)
    if time.perf_counter() - started_s >= LEAST_CACHED_SECONDS:
        # A cache that cannot be written costs the next run these seconds, and is no reason to fail this one.
        with contextlib.suppress(RunError):
            write_atomically(path, json.dumps(asdict(times)) + "\n")
    return times


def calibrate(runner: ModelRunner, pool: PagePool, max_num_rows: int) -> PassTimes:
    """Measure passes of one request with more and more rows, with a long context, and of several requests with both.

    All kinds of pass are run once after the other, again and again until the time is up, and medians are taken: a
    machine that is slow for a moment is then slow for all of them. Numbers of rows that would take too long are left
    out.
    """
    by_rows = {num_rows: _Shape(1, num_rows, CONTEXT_TOKENS) for num_rows in ROWS if num_rows <= max(max_num_rows, 2)}
    shapes = {
        **{f"{num_rows} rows": shape for num_rows, shape in by_rows.items()},
        "long": _Shape(1, 1, LONG_CONTEXT_TOKENS),
        "requests": _Shape(NUM_REQUESTS, 1, CONTEXT_TOKENS),
        "long requests": _Shape(NUM_REQUESTS, 1, LONG_SHARED_CONTEXT_TOKENS),
    }
    seconds = _measure(runner, pool, {name: shape for name, shape in shapes.items() if shape.fits(pool)})
    num_rows = [rows for rows in by_rows if f"{rows} rows" in seconds]
    by_rows_s = [seconds[f"{rows} rows"] for rows in num_rows]
    alone_s = shared_s = per_request_s = 0.0
    if "long" in seconds:
        alone_s = shared_s = max(seconds["long"] - by_rows_s[0], 0.0) / (LONG_CONTEXT_TOKENS - CONTEXT_TOKENS)
    if "requests" in seconds and NUM_REQUESTS in num_rows:
        together_s = alone_s
        if "long requests" in seconds:
            num_tokens = NUM_REQUESTS * (LONG_SHARED_CONTEXT_TOKENS - CONTEXT_TOKENS)
            together_s = max(seconds["long requests"] - seconds["requests"], 0.0) / num_tokens
            shared_s = max((NUM_REQUESTS * together_s - alone_s) / (NUM_REQUESTS - 1), 0.0)
        extra_s = seconds["requests"] - by_rows_s[num_rows.index(NUM_REQUESTS)]
        per_request_s = max(extra_s / (NUM_REQUESTS - 1) - together_s * CONTEXT_TOKENS, 0.0)
    return PassTimes(tuple(num_rows), tuple(by_rows_s), CONTEXT_TOKENS, per_request_s, alone_s, shared_s)


@dataclass(frozen=True)
class _Shape:
    """A pass to be timed: requests, rows and context tokens of each."""

    num_requests: int
    num_rows: int
    num_context_tokens: int

    def fits(self, pool: PagePool) -> bool:
        return self.num_requests * pool.pages_for(self.num_context_tokens + self.num_rows) <= pool.num_free


def _measure(runner: ModelRunner, pool: PagePool, shapes: Mapping[str, _Shape]) -> dict[str, float]:
    """Median seconds of a pass of each shape; shapes that there is no time for are left out."""
    counts = runner.num_passes, runner.num_rows
    started_s = time.perf_counter()
    taken: dict[str, list[float]] = {}
    for name, shape in shapes.items():
        if len(taken) < 2 or time.perf_counter() - started_s < MOST_SECONDS / 2:
            _time_pass(runner, pool, shape)  # a first pass allocates, and picks kernels
            taken[name] = []
    if time.perf_counter() - started_s > LEAST_TOLD_SECONDS:
        print("measuring how long passes take (kept for the next time)", file=sys.stderr, flush=True)
    for _ in range(MOST_SWEEPS):
        for name, times in taken.items():
            times.append(_time_pass(runner, pool, shapes[name]))
        if time.perf_counter() - started_s > MOST_SECONDS:
            break
    # These passes are nobody's.
    runner.num_passes, runner.num_rows = counts
    return {name: statistics.median(times) for name, times in taken.items()}


def _time_pass(runner: ModelRunner, pool: PagePool, shape: _Shape) -> float:
    tables: list[list[int]] = [[] for _ in range(shape.num_requests)]
    try:
        for table in tables:
            has_grown = pool.grow(table, shape.num_context_tokens + shape.num_rows)
            assert has_grown, "the pages were counted before"
        groups = [
            RowGroup(table, shape.num_context_tokens, [0] * shape.num_rows, num_logit_rows=shape.num_rows)
            for table in tables
        ]
        started_s = time.perf_counter()
        greedy_ids(runner.forward(groups)).tolist()
        return time.perf_counter() - started_s
    finally:
        for table in tables:
            pool.release(table)


def _read(path: Path) -> PassTimes | None:
    """The times in a file; None when it is absent, damaged, or of an older form."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        content["num_rows"], content["seconds"] = tuple(content["num_rows"]), tuple(content["seconds"])
        return PassTimes(**content)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _key(runner: ModelRunner, config: EngineConfig) -> str:
    """Hash of what the times depend on, as far as it is known."""
    model = runner.model
    architecture = model.config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        architecture.pop(name, None)
    device = model.device
    depends_on: dict[str, Any] = {
        "architecture": architecture,
        "dtype": str(model.dtype),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model(),
        "threads": torch.get_num_threads(),
        "engine": config.model_dump(mode="json", exclude=set(_FREE_SETTINGS)),
        "torch": torch.__version__,
        "jacobi-llm": jacobi_llm.__version__,
    }
    text = json.dumps(depends_on, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
