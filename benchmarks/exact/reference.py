"""The reference: one token per forward pass of transformers' model, one request at a time.

Nothing of the engine runs here. Scores go through transformers' own processors, text is decoded as a whole after every
token, and a stop string is looked for in all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from benchmarks.exact.noise import best_token, gumbel
from benchmarks.exact.question import Answer, Question
from jacobi_llm.infer.sampling_params import SamplingParams

_HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class Forward(Protocol):
    """A model, seen as a function of a text."""

    def after(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits [vocab] of the token after ``token_ids``."""


class WholeText:
    """Reads the whole text for every token, without a cache of keys and values; remembers what it has read."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    @torch.inference_mode()
    def after(self, token_ids: Sequence[int]) -> torch.Tensor:
        text = tuple(token_ids)
        if text not in self._known:
            self._known[text] = self.model(torch.tensor([text]), use_cache=False, logits_to_keep=1).logits[0, -1]
        return self._known[text]


class GrowingText:
    """Reads only what is new, with transformers' own cache of one text."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._text: list[int] = []
        self._state: dict[str, Any] = {}

    @torch.inference_mode()
    def after(self, token_ids: Sequence[int]) -> torch.Tensor:
        num_known = len(self._text)
        if not 0 < num_known < len(token_ids) or list(token_ids[:num_known]) != self._text:
            num_known, self._state = 0, {}
        new_ids = torch.tensor([list(token_ids[num_known:])])
        output = self.model(new_ids, use_cache=True, logits_to_keep=1, **self._state)
        # transformers renamed it in 5.24.
        name = "cache" if getattr(output, "cache", None) is not None else "past_key_values"
        self._text, self._state = list(token_ids), {name: output[name]}
        logits: torch.Tensor = output.logits[0, -1]
        return logits


class CountPenalties(LogitsProcessor):
    """Frequency and presence penalty, which transformers lacks, by the formula of the OpenAI API's documentation."""

    def __init__(self, sampling: SamplingParams, prompt_len: int) -> None:
        self.sampling, self.prompt_len = sampling, prompt_len

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for token_id, count in Counter(input_ids[0, self.prompt_len :].tolist()).items():
            scores[0, token_id] -= self.sampling.frequency_penalty * count
            scores[0, token_id] -= self.sampling.presence_penalty
        return scores


class Reference:
    """Answers questions.

    Args:
        forwards: the model, and the model with each adapter merged, by the adapter's name.
        tokenizer: that of the model.
        max_context: positions the model reads.
    """

    def __init__(
        self, forwards: dict[str | None, Forward], tokenizer: PreTrainedTokenizerBase, max_context: int
    ) -> None:
        self.forwards = forwards
        self.tokenizer = tokenizer
        self.max_context = max_context
        self._chosen: dict[Hashable, int] = {}

    def answer(self, question: Question) -> Answer:
        """Decode to the end."""
        params = question.params
        max_tokens = min(params.max_tokens, self.max_context - len(question.prompt_ids))
        token_ids: list[int] = []
        while True:
            token_ids.append(self.choose(question, token_ids))
            if token_ids[-1] in params.stop_token_ids:
                return Answer(tuple(token_ids), "stop", self.text(token_ids[:-1]))
            if params.stop and len(token_ids) > params.sampling.min_tokens:
                text = self._text_before_stop(token_ids, params.stop)
                if text is not None:
                    return Answer(tuple(token_ids), "stop", text)
            if len(token_ids) == max_tokens:
                return Answer(tuple(token_ids), "length", self.text(token_ids))

    def choose(self, question: Question, completion_ids: Sequence[int]) -> int:
        """The token after ``completion_ids``; remembered, since answers begin alike whatever stops them."""
        params = question.params
        # Some processors look at the stop tokens.
        asked = replace(params, max_tokens=1, stop=())
        if not (params.sampling.min_tokens or params.sampling.bad_words_ids):
            asked = replace(asked, stop_token_ids=frozenset())
        key = (question.prompt_ids, question.adapter, asked, tuple(completion_ids))
        if key not in self._chosen:
            self._chosen[key] = self._choose(question, completion_ids)
        return self._chosen[key]

    def _choose(self, question: Question, completion_ids: Sequence[int]) -> int:
        z = self.scores(question, completion_ids)
        params = question.params
        if params.sampling.temperature == 0:
            return int((z == z.max()).nonzero()[0])
        return best_token(z.tolist(), params.seed, params.choice, len(completion_ids))

    def scores(self, question: Question, completion_ids: Sequence[int]) -> torch.Tensor:
        """z [vocab]: what the argmax, or the noise, is applied to; -inf where a token is banned or cut off."""
        prompt = question.prompt_ids
        text = [*prompt, *completion_ids]
        logits = self.forwards[question.adapter].after(text)
        precise = logits if logits.dtype is torch.float64 else logits.float()
        processors = transformers_processors(question.params.sampling, prompt, question.params.stop_token_ids)
        z: torch.Tensor = processors(torch.tensor([text]), precise[None].clone())[0]
        return z

    def gap(self, question: Question, completion_ids: Sequence[int], token_ids: Sequence[int]) -> float:
        """How far the lower of ``token_ids`` lies below the best choice after ``completion_ids``; noise included."""
        params, t = question.params, len(completion_ids)
        z = self.scores(question, completion_ids).tolist()
        best_id = self.choose(question, completion_ids)

        def value(token_id: int) -> float:
            noise = gumbel(params.seed, params.choice, t, token_id) if params.sampling.temperature else 0.0
            return float(z[token_id]) + noise

        return value(best_id) - min(map(value, token_ids))

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of a completion."""
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _text_before_stop(self, token_ids: Sequence[int], stops: Sequence[str]) -> str | None:
        """The text before the stop string that the last token completes, if it does.

        Of several, the one that ends first wins, then the longest. What was text before the last token does not count:
        it was looked at when it came, or lies within ``min_tokens``.
        """
        text = self.text(token_ids)
        num_before = len(self.text(token_ids[:-1]).rstrip(_HALF_CHARACTER))
        for end in range(num_before + 1, len(text) + 1):
            lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
            if lengths:
                return text[: end - max(lengths)]
        return None


def transformers_processors(
    sampling: SamplingParams, prompt_ids: Sequence[int], stop_token_ids: frozenset[int]
) -> LogitsProcessorList:
    """transformers' processors and warpers in the order of ``generate``."""
    processors = LogitsProcessorList()
    stops = sorted(stop_token_ids)
    if sampling.logit_bias:
        processors.append(SequenceBiasLogitsProcessor([[[token_id], bias] for token_id, bias in sampling.logit_bias]))
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.frequency_penalty or sampling.presence_penalty:
        processors.append(CountPenalties(sampling, len(prompt_ids)))
    if sampling.bad_words_ids:
        processors.append(NoBadWordsLogitsProcessor([list(word) for word in sampling.bad_words_ids], stops or None))
    if sampling.min_tokens and stops:
        processors.append(MinNewTokensLengthLogitsProcessor(len(prompt_ids), sampling.min_tokens, stops))
    if sampling.allowed_token_ids is not None:
        allowed = list(sampling.allowed_token_ids)
        processors.append(PrefixConstrainedLogitsProcessor(lambda _batch, _ids: allowed, 1))
    if sampling.temperature:
        processors.extend(_warpers(sampling))
    return processors


def _warpers(sampling: SamplingParams) -> LogitsProcessorList:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return warpers
