"""From the settings of ``generate`` to :class:`SamplingParams`: the words and pairs that flags carry as text."""

from __future__ import annotations

import re
from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.configs.schema import GenerateConfig
from jacobi_llm.infer.sampling_params import SamplingParams


def sampling_params(config: GenerateConfig, tokenizer: PreTrainedTokenizerBase) -> SamplingParams:
    """Return what the flags ask for.

    Raises:
        UsageError: with all faults of the values.
    """
    return SamplingParams(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        repetition_penalty=config.repetition_penalty,
        frequency_penalty=config.frequency_penalty,
        presence_penalty=config.presence_penalty,
        logit_bias=parse_logit_bias(config.logit_bias or ()),
        bad_words_ids=bad_words_ids(config.bad_words or (), tokenizer),
        allowed_token_ids=None if config.allowed_token_ids is None else tuple(config.allowed_token_ids),
        min_tokens=config.min_tokens,
        num_logprobs=config.logprobs,
    )


def parse_logit_bias(texts: Iterable[str]) -> tuple[tuple[int, float], ...]:
    """Read ``ID=BIAS`` pairs.

    Raises:
        UsageError: with a line for each text that is no such pair.
    """
    pairs, faults = [], []
    for text in texts:
        match = re.fullmatch(r"\s*(\d+)\s*[=:]\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*", text)
        if match:
            pairs.append((int(match[1]), float(match[2])))
        else:
            faults.append(f"logit_bias: {text!r}: give ID=BIAS, such as 15=-100")
    if faults:
        raise UsageError(faults)
    return tuple(pairs)


def bad_words_ids(words: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of every word, at the start of a text and after a space (other tokens, as a rule)."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, f" {word}"):
            found[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    return tuple(found)
