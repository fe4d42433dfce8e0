"""One cell of a bench: a batch size, a mode and a window; and what its repeats add up to."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from jacobi_llm.configs.schema import DecodeMode
from jacobi_llm.infer.measurement import Measurement, agreement


@dataclass(frozen=True)
class Cell:
    """One combination to measure; a window of 1 is plain AR in either mode, and then the mode is sliding.

    A window of None is chosen by the engine.
    """

    batch_size: int
    mode: DecodeMode
    window: int | None

    @property
    def is_ar(self) -> bool:
        return self.window == 1

    @property
    def label(self) -> str:
        return "AR" if self.is_ar else f"{self.mode.value} {self.window or 'auto'}"


@dataclass(frozen=True)
class CellResult:
    """One line of the table; medians are over the repeats.

    Attributes:
        batch_size: requests in flight.
        window: rows of a request; None when the engine chose.
        tpf: completion tokens per forward pass of a request.
        tps: completion tokens per second, prefill included (median).
        ratio: tps over that of window 1, same batch size, same repeat (median).
        ttft_ms_p50, latency_ms_p50: over all requests of all repeats, from a request's admission.
        num_passes: passes of the engine in one repeat (median).
        ms_per_pass: wall time over passes (median).
        agreement: share of prompts with the ids of window 1, same batch size, same repeat.
        num_completion_tokens: of one repeat (median).
        num_preemptions: of all repeats; above 0, the K/V memory was too small for the batch size.
    """

    batch_size: int
    mode: str
    window: int | None
    tpf: float
    tps: float
    ratio: float
    ttft_ms_p50: float
    latency_ms_p50: float
    num_passes: float
    ms_per_pass: float
    agreement: float
    num_completion_tokens: float
    num_preemptions: int


def summarise(cell: Cell, runs: Sequence[Measurement], baseline: Sequence[Measurement]) -> CellResult:
    """Return the line of one cell.

    Args:
        cell: what was measured.
        runs: its measurements, one per repeat.
        baseline: those of window 1 at the same batch size, in the same order.
    """
    outputs = [output for run in runs for output in run.outputs]
    pairs = list(zip(runs, baseline, strict=True))
    return CellResult(
        batch_size=cell.batch_size,
        mode="ar" if cell.is_ar else cell.mode.value,
        window=cell.window,
        tpf=sum(run.num_completion_tokens for run in runs) / sum(run.num_forward_passes for run in runs),
        tps=statistics.median(run.tps for run in runs),
        ratio=statistics.median(run.tps / reference.tps for run, reference in pairs),
        ttft_ms_p50=statistics.median(output.ttft_ms for output in outputs),
        latency_ms_p50=statistics.median(output.latency_ms for output in outputs),
        num_passes=statistics.median(run.num_passes for run in runs),
        ms_per_pass=statistics.median(run.ms_per_pass for run in runs),
        agreement=statistics.fmean(agreement(run.outputs, reference.outputs) for run, reference in pairs),
        num_completion_tokens=statistics.median(run.num_completion_tokens for run in runs),
        num_preemptions=sum(run.num_preemptions for run in runs),
    )
