"""The batched Jacobi engine: requests join and leave at every step, each with its own window."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace

import torch

from jacobi_llm.configs.errors import QueueFullError, RunError, UsageError
from jacobi_llm.configs.schema import EngineConfig
from jacobi_llm.infer.calibration import pass_times
from jacobi_llm.infer.completion_text import CompletionText
from jacobi_llm.infer.cost_model import CostModel
from jacobi_llm.infer.kv_pages import PagePool, bytes_per_token, describe_pages, num_pages_for
from jacobi_llm.infer.logprobs import token_logprobs
from jacobi_llm.infer.model_runner import make_runner
from jacobi_llm.infer.models import LoadedModel
from jacobi_llm.infer.prefix_cache import PrefixCache
from jacobi_llm.infer.processors import LogitsProcessors
from jacobi_llm.infer.request import Request, RequestOutput, Sequence, StepOutput
from jacobi_llm.infer.rule import commit
from jacobi_llm.infer.sampler import RequestRows, choose
from jacobi_llm.infer.scheduler import ScheduledRows, Scheduler
from jacobi_llm.infer.window_policy import AutoWindows


class LLMEngine:
    """Decodes requests with one model.

    ``add_request`` may be called at any time; ``step`` runs one pass; ``generate`` runs a list to its end.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig | None = None) -> None:
        config = config or EngineConfig()
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        model = loaded.model
        self.config = config
        self.tokenizer = loaded.tokenizer
        self.acceptance_by_depth = loaded.acceptance_by_depth
        self.max_context = loaded.max_context
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        num_pages = num_pages_for(model.config, model.dtype, config.page_size, config.kv_memory_mib << 20)
        self.runner = make_runner(model, config, num_pages, loaded.name)
        self.pool = PagePool(num_pages, config.page_size, clear=self.runner.backend.clear)
        self.kv_bytes_per_token = bytes_per_token(model.config, model.dtype)
        # Everything but the adapter that K/V of equal tokens depends on.
        salt = repr((loaded.path, model.config.model_type, str(model.dtype), self.runner.backend.attention_name))
        self.prefixes = PrefixCache(self.pool, salt.encode()) if config.prefix_sharing else None
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=config.max_num_seqs,
            max_num_rows=config.max_num_rows,
            max_prefill_rows=config.max_prefill_rows,
            max_context=self.max_context,
            prefixes=self.prefixes,
        )
        self.max_num_waiting = config.max_num_waiting
        self._sequences: dict[str, Sequence] = {}

    @property
    def is_full(self) -> bool:
        """Whether the queue takes no more requests now."""
        return len(self.scheduler.waiting) >= self.max_num_waiting

    @property
    def has_unfinished(self) -> bool:
        """Whether some request waits or runs."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def add_request(self, request: Request) -> None:
        """Queue a request.

        ``max_tokens`` is lowered to what the model's context leaves.

        Raises:
            UsageError: empty prompt, id in use, a token outside the vocabulary, sampling parameters that ban every
                token, an unknown adapter, a prompt that fills the context, or a request that cannot fit the K/V pages
                even alone.
            QueueFullError: ``EngineConfig.max_num_waiting`` requests wait already.
        """
        prompt_len = len(request.prompt_ids)
        if request.id in self._sequences:
            raise UsageError(f"request {request.id}: this id is in use")
        if prompt_len == 0:
            raise UsageError(f"request {request.id}: the prompt has no tokens")
        if self.is_full:
            raise QueueFullError(
                f"request {request.id}: {len(self.scheduler.waiting)} requests wait already; try again later, or raise"
                " engine.max_num_waiting"
            )
        # What would make the whole pass fail is refused here, where it costs nobody else their answer.
        outside = next((token for token in request.prompt_ids if not 0 <= token < self.vocab_size), None)
        if outside is not None:
            raise UsageError(f"request {request.id}: token id {outside} is not in the vocabulary of {self.vocab_size}")
        params = request.params
        faults = params.sampling.faults_for(
            vocab_size=self.vocab_size, stop_token_ids=params.stop_token_ids, max_tokens=params.max_tokens
        )
        if faults:
            raise UsageError([f"request {request.id}: {fault}" for fault in faults])
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
        if request.params.window is None:
            self.use_auto_windows()
        request = replace(request, params=replace(request.params, max_tokens=max_tokens))
        self._sequences[request.id] = Sequence(
            request, time.perf_counter(), self._text_of(request), _processors_of(request, self.vocab_size)
        )
        self.scheduler.waiting.append(self._sequences[request.id])

    def use_auto_windows(self) -> None:
        """Get ready for requests without a window of their own; the first one does it, if nobody has before.

        Pass times are read from the user's cache, or measured, which takes seconds.
        """
        if not isinstance(self.scheduler.windows, AutoWindows):
            cost = CostModel(pass_times(self.runner, self.pool, self.config))
            self.scheduler.windows = AutoWindows(cost, self.acceptance_by_depth)

    def step(self) -> list[StepOutput]:
        """One pass: schedule, forward, commit."""
        scheduled = self.scheduler.schedule()
        if not scheduled:
            if self.scheduler.waiting:
                raise RunError("requests wait, but finished ones keep all K/V pages; raise engine.kv_memory_mib")
            return []
        started_s = time.perf_counter()
        chosen, logits = self._forward(scheduled)
        self.scheduler.windows.observe_pass([part.group for part in scheduled], time.perf_counter() - started_s)
        return [
            out
            for part, predictions, rows in zip(scheduled, chosen, logits, strict=True)
            if (out := self._commit(part, predictions, rows))
        ]

    def generate(self, requests: Iterable[Request]) -> list[RequestOutput]:
        """Decode ``requests`` to their end; outputs in the order of the requests.

        All or nothing: when one is refused, or a pass fails, none of them stays in the engine.

        Raises:
            UsageError: a request is refused, or others still wait or run (their outputs would be lost here).
        """
        if self.has_unfinished:
            raise UsageError("generate wants an idle engine; use add_request and step to let requests join")
        pending = deque(requests)
        ids: list[str] = []
        finished: dict[str, RequestOutput] = {}
        try:
            while pending or len(finished) < len(ids):
                while pending and not self.is_full:
                    self.add_request(pending[0])
                    ids.append(pending.popleft().id)
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
        # Its pages are known by its name, which may go to another adapter.
        self.reset_prefix_cache()

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
        self.scheduler.free_pages(self._sequences.pop(request_id))

    def describe_memory(self) -> str:
        """One line on what the K/V pages hold: ``K/V: 1,024 MiB = 46,592 tokens in ...``."""
        return f"K/V: {describe_pages(self.pool.num_pages, self.pool.page_size, self.kv_bytes_per_token)}"

    def reset_prefix_cache(self) -> None:
        """Share nothing that was computed before now: a measurement, or a shard, starts as in a new engine."""
        self.pool.forget_keys()

    def check_integrity(self) -> None:
        """Prove that every page is free, cached or counted once for each request that holds it, and none is leaked.

        Also that what is shared is right to share: a page that can be found holds the tokens of its key, lies wholly
        below what is proven, and will not be written.

        Raises:
            AssertionError: an invariant of the engine is broken.
        """
        size = self.pool.page_size
        self.pool.check_integrity(sequence.block_table for sequence in self._sequences.values())
        for sequence in self._sequences.values():
            assert sequence.num_proven <= sequence.num_computed < sequence.committed_len, "K/V in use is not committed"
            assert sequence.num_computed <= len(sequence.block_table) * size, "K/V beyond the pages"
            for index, page in enumerate(sequence.block_table):
                key = self.pool.key_of(page)
                if (index + 1) * size > sequence.num_proven:
                    assert key is None, "a page can be found before all of it is proven"
                    assert self.pool.num_holders(page) == 1, "a page that will be written is shared"
                elif key is not None:
                    assert list(key.token_ids) == sequence.tokens_from(index * size, size), "a key of other tokens"

    def _text_of(self, request: Request) -> CompletionText | None:
        if not (request.detokenize or request.params.stop):
            return None
        return CompletionText(self.tokenizer, request.params.stop, request.params.sampling.min_tokens)

    def _forward(self, scheduled: Seq[ScheduledRows]) -> tuple[list[list[int]], Seq[torch.Tensor]]:
        """The chosen token after every logit row, and those rows' logits, for each part of the pass."""
        logits = self.runner.forward([part.group for part in scheduled])
        chosen = choose(logits, [_rows_of(part) for part in scheduled])
        _mark_not_finite(scheduled, logits, chosen)
        return chosen, logits.split([part.group.num_logit_rows for part in scheduled])

    def _commit(self, part: ScheduledRows, predictions: list[int], logits: torch.Tensor) -> StepOutput | None:
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
            stop_at=sequence.text.stop_at if sequence.text else None,
        )
        logprobs = None
        if params.sampling.num_logprobs is not None:
            logprobs = tuple(token_logprobs(logits, result.token_ids, params.sampling.num_logprobs))
            sequence.logprobs.extend(logprobs)
        sequence.completion_ids.extend(result.token_ids)
        sequence.carried = result.next_guesses
        sequence.num_computed = sequence.committed_len - 1
        if sequence.is_finite:
            # The row that predicted the last token has read the K/V of all before it.
            sequence.num_proven = sequence.num_computed
            if self.prefixes:
                self.prefixes.offer(sequence)
        sequence.num_passes += 1
        sequence.commit_lengths.append(len(result.token_ids))
        sequence.first_token_s = sequence.first_token_s or now_s
        self.scheduler.learn(part, result)
        finished = None
        if result.finish_reason:
            sequence.finish_reason = result.finish_reason
            sequence.finished_s = now_s
            if sequence.text:
                sequence.text.finish()
            self.scheduler.finish(sequence)
            finished = _output_of(sequence)
            if not sequence.request.keep_pages:
                self.release(sequence.request.id)
        new_text = sequence.text.pop() if sequence.text else ""
        return StepOutput(sequence.request.id, tuple(result.token_ids), finished, new_text, logprobs)


def _processors_of(request: Request, vocab_size: int) -> LogitsProcessors | None:
    params = request.params
    if not params.sampling.has_processors:
        return None
    return LogitsProcessors(
        params.sampling,
        prompt_ids=request.prompt_ids,
        stop_token_ids=params.stop_token_ids,
        vocab_size=vocab_size,
        max_tokens=params.max_tokens,
    )


def _rows_of(part: ScheduledRows) -> RequestRows:
    sequence, params = part.sequence, part.sequence.request.params
    return RequestRows(
        num_rows=part.group.num_logit_rows,
        sampling=params.sampling,
        processors=sequence.processors,
        seed=params.seed,
        choice=params.choice,
        completion_ids=sequence.completion_ids,
        guesses=part.guesses,
    )


def _mark_not_finite(scheduled: Seq[ScheduledRows], logits: torch.Tensor, chosen: list[list[int]]) -> None:
    """Mark the requests that met NaN or infinity; one logit per row tells, for a hidden state with NaN makes all NaN.

    Args:
        scheduled: the requests of the pass.
        logits: [N, vocab].
        chosen: tokens by request, N in all.
    """
    token_ids = [token_id for tokens in chosen for token_id in tokens]
    if not token_ids:
        return
    columns = torch.tensor(token_ids, device=logits.device)[:, None]
    is_finite = logits.gather(1, columns).isfinite()[:, 0]
    if is_finite.all():
        return
    for part, rows in zip(scheduled, is_finite.split([part.group.num_logit_rows for part in scheduled]), strict=True):
        part.sequence.is_finite = part.sequence.is_finite and bool(rows.all())


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
        choice=sequence.request.params.choice,
        logprobs=None if sequence.request.params.sampling.num_logprobs is None else tuple(sequence.logprobs),
        text=sequence.text.text if sequence.text else None,
    )
