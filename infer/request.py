"""A request, its decoding state, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.configs.schema import DecodeMode, FillPolicy
from jacobi_llm.configs.stop_strings import stop_string_faults
from jacobi_llm.infer.completion_text import CompletionText
from jacobi_llm.infer.kv_pages import PageKey
from jacobi_llm.infer.logprobs import TokenLogprob
from jacobi_llm.infer.ngram_index import NgramMemory
from jacobi_llm.infer.processors import LogitsProcessors
from jacobi_llm.infer.rule import FinishReason
from jacobi_llm.infer.sampling_params import GREEDY, SamplingParams

MAX_CHOICES = 128


@dataclass(frozen=True)
class DecodeParams:
    """How one request decodes.

    Attributes:
        max_tokens: completion budget (tokens), met exactly.
        window: rows per pass in steady state; 1 is plain AR; None lets the engine choose in every step (sliding mode).
        mode: sliding (serving) or block.
        fill: policy of fresh guesses.
        stop_token_ids: every id that ends the request; empty to ignore EOS.
        stop: strings that end the request when its text holds one (infer/stopping.py says which wins); at most 16, of 1
            to 1,024 characters. Special tokens have no text, so none matches.
        seed: key of the sampling noise, and of prompt-draw guesses; any 64-bit integer, signed or not.
        choice: index among several answers to one prompt, part of the sampling key.
        sampling: how tokens are chosen; greedy unless told otherwise.
    """

    max_tokens: int
    window: int | None = 16
    mode: DecodeMode = DecodeMode.SLIDING
    fill: FillPolicy = FillPolicy.REPEAT_LAST
    stop_token_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    seed: int = 0
    choice: int = 0
    sampling: SamplingParams = GREEDY

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or (self.window is not None and self.window < 1):
            raise ValueError(f"max_tokens ({self.max_tokens}) and window ({self.window}) must be at least 1")
        if not -(2**63) <= self.seed < 2**64 or not 0 <= self.choice < 2**32:
            raise UsageError(f"seed: {self.seed}, choice {self.choice}: a seed has 64 bits, a choice 32; give less")
        if faults := stop_string_faults(self.stop):
            raise UsageError([f"stop: {fault}" for fault in faults])
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
        detokenize: outputs carry text. Those of a request with stop strings always do.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: DecodeParams
    adapter: str | None = None
    keep_pages: bool = False
    detokenize: bool = False


# Compared by identity: the scheduler looks for sequences in its lists at every step.
@dataclass(eq=False)
class Sequence:
    """Decoding state of a request; the engine alone mutates it.

    Invariant: K/V is valid for positions below ``num_computed``, which is at most committed_len - 1.

    Attributes:
        completion_ids: committed completion tokens.
        text: of the completion; None when nobody needs it.
        num_computed: positions with valid K/V.
        num_proven: positions among these that a row with finite logits has read, so that their K/V is finite too.
        is_finite: False once a logit row of this request held NaN or infinity.
        page_keys: keys of its first full pages, as far as they were asked for.
        num_offered_pages: leading pages that came from others or were offered to them.
        carried: guesses left by the last pass.
        ngrams: what n-gram guesses are copied from, made when first needed.
        block_end: completion length at which the current block ends (block mode).
        commit_lengths: tokens committed by each pass that committed any, in order.
        processors: what changes its logits; None when nothing does.
        logprobs: of the committed tokens, when they are asked for.
        num_passes: passes the request took part in; prefill counts 1 however chunked.
        arrived_s, first_token_s, finished_s: perf_counter seconds.
    """

    request: Request
    arrived_s: float
    text: CompletionText | None = None
    processors: LogitsProcessors | None = None
    completion_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_proven: int = 0
    is_finite: bool = True
    page_keys: list[PageKey] = field(default_factory=list)
    num_offered_pages: int = 0
    carried: list[int] = field(default_factory=list)
    ngrams: NgramMemory | None = None
    block_end: int = 0
    block_table: list[int] = field(default_factory=list)
    commit_lengths: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
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
        token_ids: completion, up to and including the stop token, or the token that completed a stop string.
        forward_passes: passes the request took part in; prefill counts 1.
        commit_lengths: tokens committed by each of those passes.
        ttft_ms, latency_ms: from arrival to the first commit and to the end.
        choice: index among several answers to one prompt.
        logprobs: one for each token of ``token_ids``; None when they were not asked for.
        text: what ``token_ids`` say before the stop token or stop string, without special tokens; None unless asked for
            (``Request.detokenize``, or stop strings).
    """

    id: str
    prompt_tokens: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    forward_passes: int
    commit_lengths: tuple[int, ...]
    ttft_ms: float
    latency_ms: float
    choice: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    text: str | None = None

    @property
    def tokens_per_forward(self) -> float:
        return len(self.token_ids) / self.forward_passes


@dataclass(frozen=True)
class StepOutput:
    """Tokens that one step committed for one request.

    Attributes:
        finished: set with the last commit.
        new_text: what became certain of the text; joined, these are ``RequestOutput.text``. Empty when that is None.
        logprobs: one for each new token; None when they were not asked for.
    """

    request_id: str
    new_token_ids: tuple[int, ...]
    finished: RequestOutput | None
    new_text: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None


def expand_choices(request: Request, num_choices: int) -> list[Request]:
    """Return the requests for several answers to one prompt: the same seed, choice 0, 1, ..., ids ``id/0``, ``id/1``.

    A single choice is the request itself, its id unchanged.

    Raises:
        UsageError: ``num_choices`` is not from 1 to ``MAX_CHOICES``.
    """
    if not 1 <= num_choices <= MAX_CHOICES:
        raise UsageError(f"n: {num_choices}: give a number of choices from 1 to {MAX_CHOICES}")
    return [
        replace(request, id=id, params=replace(request.params, choice=choice))
        for choice, id in enumerate(choice_ids(request.id, num_choices))
    ]


def choice_ids(request_id: str, num_choices: int) -> list[str]:
    """Ids of the answers to one prompt; a single one keeps the id as it is."""
    return [request_id] if num_choices == 1 else [f"{request_id}/{choice}" for choice in range(num_choices)]
