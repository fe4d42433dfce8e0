"""A request, its decoding state, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass, field

from jacobi_llm.configs.schema import DecodeMode, FillPolicy
from jacobi_llm.infer.ngram_index import NgramMemory
from jacobi_llm.infer.rule import FinishReason


@dataclass(frozen=True)
class DecodeParams:
    """How one request decodes.

    Attributes:
        max_tokens: completion budget (tokens), met exactly.
        window: rows per pass in steady state; 1 is plain AR; None lets the engine choose in every step (sliding mode).
        mode: sliding (serving) or block.
        fill: policy of fresh guesses.
        stop_token_ids: every id that ends the request; empty to ignore EOS.
        seed: key of prompt-draw guesses (and of sampling noise).
        choice: index among several answers to one prompt, part of the sampling key.
    """

    max_tokens: int
    window: int | None = 16
    mode: DecodeMode = DecodeMode.SLIDING
    fill: FillPolicy = FillPolicy.REPEAT_LAST
    stop_token_ids: frozenset[int] = frozenset()
    seed: int = 0
    choice: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or (self.window is not None and self.window < 1):
            raise ValueError(f"max_tokens ({self.max_tokens}) and window ({self.window}) must be at least 1")
        if self.window is None and self.mode is DecodeMode.BLOCK:
            raise ValueError("block mode needs a window")


@dataclass(frozen=True)
class Request:
    """What is asked of the engine.

    Attributes:
        id: unique among the requests in the engine.
        prompt_ids: at least one token.
        params: see :class:`DecodeParams`.
        adapter: name of the adapter, None for the base weights.
        keep_pages: leave the K/V pages with the finished request until ``LLMEngine.release`` (collection needs them).
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: DecodeParams
    adapter: str | None = None
    keep_pages: bool = False


@dataclass
class Sequence:
    """Decoding state of a request; the engine alone mutates it.

    Invariant: K/V is valid for positions below ``num_computed``, which is at most committed_len - 1.

    Attributes:
        completion_ids: committed completion tokens.
        num_computed: positions with valid K/V.
        carried: guesses left by the last pass.
        ngrams: what n-gram guesses are copied from, made when first needed.
        block_end: completion length at which the current block ends (block mode).
        commit_lengths: tokens committed by each pass that committed any, in order.
        num_passes: passes the request took part in; prefill counts 1 however chunked.
        arrived_s, first_token_s, finished_s: perf_counter seconds.
    """

    request: Request
    arrived_s: float
    completion_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    carried: list[int] = field(default_factory=list)
    ngrams: NgramMemory | None = None
    block_end: int = 0
    block_table: list[int] = field(default_factory=list)
    commit_lengths: list[int] = field(default_factory=list)
    num_passes: int = 0
    finish_reason: FinishReason | None = None
    first_token_s: float | None = None
    finished_s: float | None = None

    @property
    def committed_len(self) -> int:
        return len(self.request.prompt_ids) + len(self.completion_ids)

    @property
    def num_pending(self) -> int:
        """Committed tokens without K/V, at least 1: the rows that every pass starts with."""
        return self.committed_len - self.num_computed

    @property
    def num_tokens_left(self) -> int:
        return self.request.params.max_tokens - len(self.completion_ids)

    @property
    def last_token_id(self) -> int:
        return self.completion_ids[-1] if self.completion_ids else self.request.prompt_ids[-1]

    def tokens_from(self, position: int, num_tokens: int) -> list[int]:
        """Committed tokens at positions ``position .. position + num_tokens - 1``."""
        prompt_len = len(self.request.prompt_ids)
        end = position + num_tokens
        return [
            *self.request.prompt_ids[position:end],
            *self.completion_ids[max(position - prompt_len, 0) : max(end - prompt_len, 0)],
        ]


@dataclass(frozen=True)
class RequestOutput:
    """A finished request.

    Attributes:
        token_ids: completion, the stop token included when one was reached.
        forward_passes: passes the request took part in; prefill counts 1.
        commit_lengths: tokens committed by each of those passes.
        ttft_ms, latency_ms: from arrival to the first commit and to the end.
    """

    id: str
    prompt_tokens: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    forward_passes: int
    commit_lengths: tuple[int, ...]
    ttft_ms: float
    latency_ms: float

    @property
    def tokens_per_forward(self) -> float:
        return len(self.token_ids) / self.forward_passes


@dataclass(frozen=True)
class StepOutput:
    """Tokens that one step committed for one request; ``finished`` is set with its last commit."""

    request_id: str
    new_token_ids: tuple[int, ...]
    finished: RequestOutput | None
