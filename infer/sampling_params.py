"""How a request chooses its tokens: temperature, truncation, penalties, bans, logprobs; checked when it is made."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from jacobi_llm.configs.errors import UsageError

MIN_TEMPERATURE = 1e-3
MAX_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    """Every processor is applied to each row of a window with that row's own prefix.

    Order and meaning are those of transformers, frequency and presence penalty those of the OpenAI API: logit bias,
    repetition, frequency, presence, bad words, min tokens, allowed ids; then, where temperature is not 0, division by
    the temperature, top-k, top-p, min-p.

    Attributes:
        temperature: 0 takes the likeliest token (and top-k, top-p, min-p do nothing), else at least
            ``MIN_TEMPERATURE``.
        top_k: keep the k likeliest tokens, and those as likely as the last of them; 0 keeps all.
        top_p: keep the likeliest tokens that together have this probability, at least one; 1 keeps all.
        min_p: keep tokens with at least this share of the likeliest one's probability; 0 keeps all.
        repetition_penalty: above 0; logits of tokens of prompt or completion are divided by it, negative ones
            multiplied.
        frequency_penalty: from -2 to 2; taken off a logit for each time its token stands in the completion.
        presence_penalty: from -2 to 2; taken off once when it does.
        logit_bias: pairs of token id and what is added to its logit, from -100 to 100.
        bad_words_ids: token sequences that are never completed; a single stop token among them has no effect (as in
            transformers).
        allowed_token_ids: all other tokens are banned; None allows all.
        min_tokens: stop tokens are banned until the completion has so many tokens.
        num_logprobs: None computes no logprobs, 0 the chosen token's, N the N likeliest ones' besides; at most
            ``MAX_LOGPROBS``.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    min_tokens: int = 0
    num_logprobs: int | None = None

    def __post_init__(self) -> None:
        faults = [*self._number_faults(), *self._token_faults()]
        if faults:
            raise UsageError(faults)

    @property
    def has_processors(self) -> bool:
        """Whether the logits are changed before temperature and truncation."""
        return (
            self.has_penalties
            or bool(self.logit_bias or self.bad_words_ids or self.min_tokens)
            or self.allowed_token_ids is not None
        )

    @property
    def has_penalties(self) -> bool:
        """Whether a row's prefix changes the logits of the tokens in it."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def truncates(self) -> bool:
        """Whether sampling leaves unlikely tokens out."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    def faults_for(self, *, vocab_size: int, stop_token_ids: Collection[int], max_tokens: int) -> list[str]:
        """What is wrong with these parameters for one model and request, a line for each fault.

        A request must never meet a row in which everything is banned, so an id that may be banned in some row (the
        last token of a bad word, a stop token under ``min_tokens``) counts as banned here.
        """
        faults = []
        for name, ids in self._ids_by_name().items():
            outside = next((token_id for token_id in ids if token_id >= vocab_size), None)
            if outside is not None:
                faults.append(f"{name}: token id {outside} is not in the vocabulary of {vocab_size}")
        if self.min_tokens > max_tokens:
            faults.append(f"min_tokens: {self.min_tokens} is above max_tokens ({max_tokens}); lower it")
        if faults:
            return faults
        banned = {word[-1] for word in self.bad_words_ids}
        if self.min_tokens:
            banned.update(stop_token_ids)
        allowed = range(vocab_size) if self.allowed_token_ids is None else self.allowed_token_ids
        if all(token_id in banned for token_id in allowed):
            faults.append(
                "allowed_token_ids: every allowed token may be banned by bad_words_ids or min_tokens; allow another one"
            )
        return faults

    def _ids_by_name(self) -> dict[str, list[int]]:
        return {
            "logit_bias": [token_id for token_id, _ in self.logit_bias],
            "bad_words_ids": [token_id for word in self.bad_words_ids for token_id in word],
            "allowed_token_ids": list(self.allowed_token_ids or ()),
        }

    def _number_faults(self) -> list[str]:
        checks = {
            "temperature": (
                self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < math.inf,
                f"give 0 (greedy) or at least {MIN_TEMPERATURE}",
            ),
            "top_k": (self.top_k >= 0, "give 0 (off) or more"),
            "top_p": (0 < self.top_p <= 1, "it must be above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "it must be from 0 to 1"),
            "repetition_penalty": (0 < self.repetition_penalty < math.inf, "it must be above 0"),
            "frequency_penalty": (-2 <= self.frequency_penalty <= 2, "it must be from -2 to 2"),
            "presence_penalty": (-2 <= self.presence_penalty <= 2, "it must be from -2 to 2"),
            "min_tokens": (self.min_tokens >= 0, "give 0 (off) or more"),
            "num_logprobs": (
                self.num_logprobs is None or 0 <= self.num_logprobs <= MAX_LOGPROBS,
                f"it must be from 0 to {MAX_LOGPROBS}",
            ),
        }
        faults = {name: remedy for name, (is_right, remedy) in checks.items() if not is_right}
        return [f"{name}: {getattr(self, name)}: {remedy}" for name, remedy in faults.items()]

    def _token_faults(self) -> list[str]:
        faults = []
        for name, ids in self._ids_by_name().items():
            negative = next((token_id for token_id in ids if token_id < 0), None)
            if negative is not None:
                faults.append(f"{name}: {negative}: token ids are 0 or more")
        biased = [token_id for token_id, _ in self.logit_bias]
        twice = next((token_id for token_id in biased if biased.count(token_id) > 1), None)
        if twice is not None:
            faults.append(f"logit_bias: token id {twice} is given twice; give it once")
        far = next((bias for _, bias in self.logit_bias if not -100 <= bias <= 100), None)
        if far is not None:
            faults.append(f"logit_bias: {far}: it must be from -100 to 100")
        if any(not word for word in self.bad_words_ids):
            faults.append("bad_words_ids: a word without tokens; leave it out")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            faults.append("allowed_token_ids: no token is allowed; give at least one")
        return faults


GREEDY = SamplingParams()
