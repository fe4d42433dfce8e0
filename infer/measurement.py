"""Decodes requests against the clock; what bench, held-out evaluation and the GPU check count is counted here.

measured = measure(engine, requests, in_flight=8)
print(measured.tpf, measured.tps)
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.request import Request, RequestOutput


@dataclass(frozen=True)
class Measurement:
    """One run over some requests.

    Attributes:
        outputs: in the order of the requests.
        wall_s: seconds from the first request's arrival to the last one's end, prefill included.
        num_passes: forward passes of the engine.
        num_rows: rows of all those passes.
        num_preemptions: requests that lost their pages on the way; above 0, K/V memory was too small for this load.
    """

    outputs: tuple[RequestOutput, ...]
    wall_s: float
    num_passes: int
    num_rows: int
    num_preemptions: int

    @property
    def num_completion_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def num_forward_passes(self) -> int:
        """Passes summed over the requests: a pass that serves 8 requests counts 8 times."""
        return sum(output.forward_passes for output in self.outputs)

    @property
    def tpf(self) -> float:
        """Tokens per forward pass of a request; plain AR is 1.00."""
        return self.num_completion_tokens / self.num_forward_passes

    @property
    def tps(self) -> float:
        """Completion tokens per second, prefill included."""
        return self.num_completion_tokens / self.wall_s

    @property
    def ms_per_pass(self) -> float:
        return self.wall_s * 1e3 / self.num_passes

    @property
    def ttft_ms_p50(self) -> float:
        return statistics.median(output.ttft_ms for output in self.outputs)

    @property
    def latency_ms_p50(self) -> float:
        return statistics.median(output.latency_ms for output in self.outputs)


def measure(
    engine: LLMEngine,
    requests: Sequence[Request],
    *,
    in_flight: int | None = None,
    on_finished: Callable[[RequestOutput], None] | None = None,
) -> Measurement:
    """Decode ``requests`` to their end and time it.

    K/V pages of earlier measurements are not found again: prefill is part of what is measured.

    Args:
        engine: idle; it is left idle.
        requests: at least one.
        in_flight: requests in the engine at a time: one more is added whenever one ends, and times to the first token
            count from there. None adds all at once, so that those times include the wait for a place.
        on_finished: called with each output as it ends; its time is part of the measurement.

    Raises:
        UsageError: a request that the engine refuses.
    """
    if not requests or (in_flight is not None and in_flight < 1):
        raise ValueError("a measurement needs at least one request, and at least one in flight")
    engine.reset_prefix_cache()
    waiting = deque(requests)
    finished: dict[str, RequestOutput] = {}
    before = (engine.runner.num_passes, engine.runner.num_rows, engine.scheduler.num_preemptions)
    _synchronize(engine)
    start_s = time.perf_counter()
    while len(finished) < len(requests):
        most_waiting = 0 if in_flight is None else max(len(requests) - len(finished) - in_flight, 0)
        while len(waiting) > most_waiting and not engine.is_full:
            engine.add_request(waiting.popleft())
        for step in engine.step():
            if step.finished:
                finished[step.request_id] = step.finished
                if on_finished:
                    on_finished(step.finished)
    _synchronize(engine)
    return Measurement(
        outputs=tuple(finished[request.id] for request in requests),
        wall_s=time.perf_counter() - start_s,
        num_passes=engine.runner.num_passes - before[0],
        num_rows=engine.runner.num_rows - before[1],
        num_preemptions=engine.scheduler.num_preemptions - before[2],
    )


def agreement(outputs: Sequence[RequestOutput], baseline: Sequence[RequestOutput]) -> float:
    """Return the share of requests whose token ids equal the baseline's, pair by pair."""
    pairs = list(zip(outputs, baseline, strict=True))
    return sum(output.token_ids == reference.token_ids for output, reference in pairs) / len(pairs)


def _synchronize(engine: LLMEngine) -> None:
    # A GPU runs behind the program: without this its last kernels would go uncounted, or be counted twice.
    if engine.runner.model.device.type == "cuda":
        torch.cuda.synchronize(engine.runner.model.device)
