"""The batched Jacobi engine: requests join and leave at every step, each with its own window."""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace

import torch

from jacobi_llm.configs.errors import RunError, UsageError
from jacobi_llm.configs.schema import EngineConfig
from jacobi_llm.infer.kv_pages import PagePool, bytes_per_token, num_pages_for
from jacobi_llm.infer.model_runner import make_runner
from jacobi_llm.infer.models import LoadedModel
from jacobi_llm.infer.request import Request, RequestOutput, Sequence, StepOutput
from jacobi_llm.infer.rule import commit
from jacobi_llm.infer.sampler import RowKey, choose
from jacobi_llm.infer.scheduler import ScheduledRows, Scheduler


class LLMEngine:
    """Decodes requests with one model.

    ``add_request`` may be called at any time; ``step`` runs one pass; ``generate`` runs a list to its end.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig | None = None) -> None:
        config = config or EngineConfig()
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        model = loaded.model
        self.max_context = loaded.max_context
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        num_pages = num_pages_for(model.config, model.dtype, config.page_size, config.kv_memory_mib << 20)
        self.pool = PagePool(num_pages, config.page_size)
        self.kv_bytes_per_token = bytes_per_token(model.config, model.dtype)
        self.runner = make_runner(model, config, num_pages, loaded.name)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=config.max_num_seqs,
            max_num_rows=config.max_num_rows,
            max_context=self.max_context,
        )
        self._sequences: dict[str, Sequence] = {}

    def add_request(self, request: Request) -> None:
        """Queue a request.

        ``max_tokens`` is lowered to what the model's context leaves.

        Raises:
            UsageError: empty prompt, id in use, a token outside the vocabulary, an adapter that is not loaded, a prompt
                that fills the context, or a request that cannot fit the K/V pages even alone.
        """
        prompt_len = len(request.prompt_ids)
        if request.id in self._sequences:
            raise UsageError(f"request {request.id}: this id is in use")
        if prompt_len == 0:
            raise UsageError(f"request {request.id}: the prompt has no tokens")
        # What would make the whole pass fail is refused here, where it costs nobody else their answer.
        outside = next((token for token in request.prompt_ids if not 0 <= token < self.vocab_size), None)
        if outside is not None:
            raise UsageError(f"request {request.id}: token id {outside} is not in the vocabulary of {self.vocab_size}")
        if request.adapter is not None:
            self._check_adapter(request)
        if prompt_len >= self.max_context:
            raise UsageError(
                f"request {request.id}: {prompt_len} prompt tokens leave no room in the context of {self.max_context}"
            )
        max_tokens = min(request.params.max_tokens, self.max_context - prompt_len)
        # The last token is returned, never read: it needs no slot.
        num_pages = self.pool.pages_for(prompt_len + max_tokens - 1)
        if num_pages > self.pool.num_pages:
            raise UsageError(
                f"request {request.id}: {prompt_len} prompt + {max_tokens} completion tokens need {num_pages} K/V pages"
                f", the pool has {self.pool.num_pages}; raise engine.kv_memory_mib or lower max_tokens"
            )
        request = replace(request, params=replace(request.params, max_tokens=max_tokens))
        self._sequences[request.id] = Sequence(request, arrived_s=time.perf_counter())
        self.scheduler.waiting.append(self._sequences[request.id])

    def step(self) -> list[StepOutput]:
        """One pass: schedule, forward, commit."""
        scheduled = self.scheduler.schedule()
        if not scheduled:
            if self.scheduler.waiting:
                raise RunError("requests wait, but finished ones keep all K/V pages; raise engine.kv_memory_mib")
            return []
        predictions = self._forward(scheduled)
        return [out for part, chosen in zip(scheduled, predictions, strict=True) if (out := self._commit(part, chosen))]

    def generate(self, requests: Iterable[Request]) -> list[RequestOutput]:
        """Decode ``requests`` to their end; outputs in the order of the requests.

        All or nothing: when one is refused, or a pass fails, none of them stays in the engine.

        Raises:
            UsageError: a request is refused, or others still wait or run (their outputs would be lost here).
        """
        if self.scheduler.waiting or self.scheduler.running:
            raise UsageError("generate wants an idle engine; use add_request and step to let requests join")
        ids: list[str] = []
        finished: dict[str, RequestOutput] = {}
        try:
            for request in requests:
                self.add_request(request)
                ids.append(request.id)
            while len(finished) < len(ids):
                finished.update({out.request_id: out.finished for out in self.step() if out.finished})
        except BaseException:
            for request_id in ids:
                self.abort(request_id)
            raise
        return [finished[request_id] for request_id in ids]

    def abort(self, request_id: str) -> None:
        """Drop a request and free its pages at once; unknown ids are ignored (it may just have ended)."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return
        if sequence.finish_reason is None:
            self.scheduler.finish(sequence)
        self.release(request_id)

    def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA folder beside the base weights; requests choose it by ``name``.

        Raises:
            UsageError: a name in use, an adapter that is not plain LoRA or not of this model, or no native attention.
        """
        self.runner.load_adapter(name, path)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter.

        Raises:
            UsageError: no such adapter, or a request in the engine uses it.
        """
        user = next((id for id, sequence in self._sequences.items() if sequence.request.adapter == name), None)
        if user is not None:
            raise UsageError(f"adapter '{name}': request {user} uses it; wait for its end, or abort it")
        self.runner.unload_adapter(name)

    def _check_adapter(self, request: Request) -> None:
        assert request.adapter is not None
        try:
            self.runner.check_adapter(request.adapter)
        except UsageError as error:
            raise UsageError(f"request {request.id}: {error}") from None

    def pages_of(self, request_id: str) -> list[int]:
        """Block table of a finished request that keeps its pages; K/V is valid below its last token's position."""
        return self._sequences[request_id].block_table

    def release(self, request_id: str) -> None:
        """Free the pages of a finished request that kept them."""
        self.pool.release(self._sequences.pop(request_id).block_table)

    def check_integrity(self) -> None:
        """Prove that every page is owned once and none is leaked.

        Raises:
            AssertionError: an invariant of the engine is broken.
        """
        self.pool.check_integrity(sequence.block_table for sequence in self._sequences.values())
        for sequence in self.scheduler.running:
            assert sequence.num_computed < sequence.committed_len, "K/V of a token that is not committed is in use"
            assert sequence.num_computed <= len(sequence.block_table) * self.pool.page_size, "K/V beyond the pages"

    def _forward(self, scheduled: Seq[ScheduledRows]) -> list[list[int]]:
        logits = self.runner.forward([part.group for part in scheduled])
        keys = [
            RowKey(part.sequence.request.params.seed, part.sequence.request.params.choice, t)
            for part in scheduled
            for t in range(
                len(part.sequence.completion_ids), len(part.sequence.completion_ids) + part.group.num_logit_rows
            )
        ]
        chosen = iter(choose(logits, keys)) if keys else iter(())
        return [[next(chosen) for _ in range(part.group.num_logit_rows)] for part in scheduled]

    def _commit(self, part: ScheduledRows, predictions: list[int]) -> StepOutput | None:
        sequence = part.sequence
        if not predictions:
            sequence.num_computed += part.group.num_rows
            return None
        now_s = time.perf_counter()
        params = sequence.request.params
        result = commit(
            part.guesses,
            predictions,
            stop_token_ids=params.stop_token_ids,
            num_tokens_left=sequence.num_tokens_left,
        )
        sequence.completion_ids.extend(result.token_ids)
        sequence.carried = result.next_guesses
        sequence.num_computed = sequence.committed_len - 1
        sequence.num_passes += 1
        sequence.commit_lengths.append(len(result.token_ids))
        sequence.first_token_s = sequence.first_token_s or now_s
        finished = None
        if result.finish_reason:
            sequence.finish_reason = result.finish_reason
            sequence.finished_s = now_s
            self.scheduler.finish(sequence)
            finished = _output_of(sequence)
            if not sequence.request.keep_pages:
                self.release(sequence.request.id)
        return StepOutput(sequence.request.id, tuple(result.token_ids), finished)


def _output_of(sequence: Sequence) -> RequestOutput:
    if sequence.finish_reason is None or sequence.first_token_s is None or sequence.finished_s is None:
        raise AssertionError("an unfinished request has no output")
    return RequestOutput(
        id=sequence.request.id,
        prompt_tokens=len(sequence.request.prompt_ids),
        token_ids=tuple(sequence.completion_ids),
        finish_reason=sequence.finish_reason,
        forward_passes=sequence.num_passes,
        commit_lengths=tuple(sequence.commit_lengths),
        ttft_ms=(sequence.first_token_s - sequence.arrived_s) * 1e3,
        latency_ms=(sequence.finished_s - sequence.arrived_s) * 1e3,
    )
