"""Decodes held-out prompts with the engine: tokens per forward pass, acceptance by depth, agreement, repetition.

These are the figures that count in consistency training; the loss only stands in for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.configs.schema import EvalConfig, OnBadInput
from jacobi_llm.data.sources import read_source
from jacobi_llm.data.word_problems import is_correct
from jacobi_llm.infer.detokenizer import decode
from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.measurement import Measurement, measure
from jacobi_llm.infer.models import LoadedModel
from jacobi_llm.infer.prompt import Prompt, render_prompt
from jacobi_llm.infer.request import DecodeParams, Request, RequestOutput

REPEATED_NGRAM = 4


@dataclass(frozen=True)
class HeldOut:
    """Held-out prompts, rendered.

    Attributes:
        prompts: drawn from the evaluation source.
        prompt_ids: token ids, one tuple per prompt.
        config: how they are decoded.
        eos_token_ids: every id that ends an answer.
    """

    prompts: tuple[Prompt, ...]
    prompt_ids: tuple[tuple[int, ...], ...]
    config: EvalConfig
    eos_token_ids: tuple[int, ...]

    @classmethod
    def read(cls, config: EvalConfig, loaded: LoadedModel) -> HeldOut:
        """Draw and render the prompts.

        Raises:
            UsageError: the source has no prompts in that split.
        """
        source = read_source(
            config.input, config.split, limit=config.num_prompts, seed=config.seed, on_bad_input=OnBadInput.FAIL
        )
        if not source.prompts:
            raise UsageError(f"eval.input: {config.input} has no prompts in its {config.split.value} part")
        rendered = (tuple(render_prompt(prompt, loaded.tokenizer, config.format)) for prompt in source.prompts)
        return cls(tuple(source.prompts), tuple(rendered), config, loaded.eos_token_ids)

    def first(self, num_prompts: int) -> HeldOut:
        """The same evaluation over the first prompts only (a warm-up)."""
        return replace(self, prompts=self.prompts[:num_prompts], prompt_ids=self.prompt_ids[:num_prompts])

    def decode(self, engine: LLMEngine, *, window: int | None, batch_size: int | None = None) -> Measurement:
        """Decode every prompt greedily; ``batch_size`` requests at a time, the config's by default.

        A ``window`` of None is chosen by the engine.
        """
        params = DecodeParams(
            max_tokens=self.config.max_tokens,
            window=window,
            fill=self.config.fill,
            stop_token_ids=frozenset(self.eos_token_ids),
            seed=self.config.seed,
        )
        requests = [Request(f"heldout-{number}", ids, params) for number, ids in enumerate(self.prompt_ids)]
        return measure(engine, requests, in_flight=batch_size or self.config.batch_size)

    def share_correct(self, outputs: Sequence[RequestOutput], tokenizer: PreTrainedTokenizerBase) -> float | None:
        """Share of checkable answers that are right; None when no prompt carries one."""
        pairs = [
            (prompt.answer, decode(tokenizer, output.token_ids))
            for prompt, output in zip(self.prompts, outputs, strict=True)
            if prompt.answer is not None
        ]
        return sum(is_correct(answer, text) for answer, text in pairs) / len(pairs) if pairs else None


def acceptance_by_depth(outputs: Sequence[RequestOutput], window: int, max_tokens: int) -> list[float]:
    """P(guess at depth d accepted | depth d-1 accepted), d = 1 .. window-1; cut before the first depth never reached.

    A pass of n rows commits a tokens: guesses 1 .. a-1 were accepted, guess a, if there was one, was not. The pass
    that ends a request is left out, since a stop token hides how far it would have gone.
    """
    num_reached = [0] * (window + 1)
    num_accepted = [0] * (window + 1)
    for output in outputs:
        num_tokens = 0
        for committed in output.commit_lengths[:-1]:
            num_guesses = min(window - 1, max_tokens - num_tokens - 1)
            num_tokens += committed
            for depth in range(1, min(committed, num_guesses) + 1):
                num_reached[depth] += 1
                num_accepted[depth] += depth < committed
    shares: list[float] = []
    for depth in range(1, window):
        if not num_reached[depth]:
            break
        shares.append(num_accepted[depth] / num_reached[depth])
    return shares


def common_share(outputs: Sequence[RequestOutput], baseline: Sequence[RequestOutput]) -> float:
    """Share of the baseline's tokens that come before the first divergence, over all pairs."""
    common = 0
    for output, reference in zip(outputs, baseline, strict=True):
        for ours, theirs in zip(output.token_ids, reference.token_ids, strict=False):
            if ours != theirs:
                break
            common += 1
    return common / sum(len(reference.token_ids) for reference in baseline)


def repetition(outputs: Sequence[RequestOutput]) -> float:
    """Share of 4-grams that repeat an earlier one of the same answer, over all answers; 0 when all are too short."""
    num_repeated = num_total = 0
    for output in outputs:
        ids = output.token_ids
        counts = Counter(ids[i : i + REPEATED_NGRAM] for i in range(len(ids) - REPEATED_NGRAM + 1))
        num_total += counts.total()
        num_repeated += counts.total() - len(counts)
    return num_repeated / num_total if num_total else 0.0
