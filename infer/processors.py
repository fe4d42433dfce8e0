"""Logits processors of one request: penalties, bias and bans, each row of a window with its own prefix.

Row i of a window has the prefix prompt + committed completion + the guesses g_1..g_i. Meaning and order are those of
transformers' processors (SequenceBiasLogitsProcessor for single tokens, RepetitionPenaltyLogitsProcessor,
NoBadWordsLogitsProcessor, MinNewTokensLengthLogitsProcessor, PrefixConstrainedLogitsProcessor, in the order of
``generate``); frequency and presence penalty, which transformers lacks, are those of the OpenAI API and follow the
repetition penalty.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from jacobi_llm.infer.prefix_counts import PrefixCounts
from jacobi_llm.infer.sampling_params import SamplingParams

_BANNED = float("-inf")


class LogitsProcessors:
    """What changes the scores of one request; holds the counts of its prefix, and nothing of any pass."""

    def __init__(
        self,
        sampling: SamplingParams,
        *,
        prompt_ids: Sequence[int],
        stop_token_ids: Collection[int],
        vocab_size: int,
        max_tokens: int,
    ) -> None:
        self._sampling = sampling
        self._prompt_ids = prompt_ids
        self._counts = PrefixCounts(prompt_ids, max_tokens) if sampling.has_penalties else None
        self._bias_ids = torch.tensor([token_id for token_id, _ in sampling.logit_bias], dtype=torch.int64)
        self._bias = [bias for _, bias in sampling.logit_bias]
        self._stop_ids = torch.tensor(
            [token_id for token_id in stop_token_ids if 0 <= token_id < vocab_size], dtype=torch.int64
        )
        self._is_banned: torch.Tensor | None = None
        if sampling.allowed_token_ids is not None:
            self._is_banned = torch.ones(vocab_size, dtype=torch.bool)
            self._is_banned[list(sampling.allowed_token_ids)] = False
        words = [word for word in sampling.bad_words_ids if not (len(word) == 1 and word[0] in stop_token_ids)]
        self._bad_ids = torch.tensor(sorted({word[0] for word in words if len(word) == 1}), dtype=torch.int64)
        # Words of several tokens by the token before their last one: few rows have to look at any.
        self._bad_words: dict[int, list[tuple[int, ...]]] = {}
        for word in words:
            if len(word) > 1:
                self._bad_words.setdefault(word[-2], []).append(word)
        self._longest_word = max((len(word) for word in words), default=0)

    def apply(self, scores: torch.Tensor, completion_ids: Sequence[int], guesses: Sequence[int]) -> None:
        """Change the scores of one window in place.

        Args:
            scores: [n, vocab] on the CPU, float32 or float64.
            completion_ids: all committed tokens of the request; longer or equal at every call.
            guesses: the n - 1 tokens that rows 1 .. n-1 read.
        """
        if self._bias:
            scores[:, self._bias_ids] += torch.tensor(self._bias, dtype=scores.dtype)
        if self._counts is not None:
            self._counts.extend(completion_ids)
            self._penalise(scores, self._counts, guesses)
        if len(self._bad_ids):
            scores[:, self._bad_ids] = _BANNED
        if self._bad_words:
            self._ban_words(scores, completion_ids, guesses)
        num_too_early = min(self._sampling.min_tokens - len(completion_ids), scores.shape[0])
        if num_too_early > 0:
            scores[:num_too_early, self._stop_ids] = _BANNED
        if self._is_banned is not None:
            scores.masked_fill_(self._is_banned, _BANNED)

    def _penalise(self, scores: torch.Tensor, counts: PrefixCounts, guesses: Sequence[int]) -> None:
        sampling = self._sampling
        found = counts.of_rows(guesses)
        token_ids = torch.from_numpy(found.token_ids)
        seen = scores.index_select(1, token_ids)
        if sampling.repetition_penalty != 1:
            penalty = sampling.repetition_penalty
            penalised = torch.where(seen < 0, seen * penalty, seen / penalty)
            seen = torch.where(torch.from_numpy(found.is_seen), penalised, seen)
        in_completion = torch.from_numpy(found.in_completion)
        seen = seen - sampling.frequency_penalty * in_completion.to(scores.dtype)
        seen = seen - sampling.presence_penalty * (in_completion > 0).to(scores.dtype)
        scores.index_copy_(1, token_ids, seen)

    def _ban_words(self, scores: torch.Tensor, completion_ids: Sequence[int], guesses: Sequence[int]) -> None:
        before = self._longest_word - 1
        tail = [*self._prompt_ids[-before:], *completion_ids[-before:]][-before:]
        tokens = (*tail, *guesses)
        rows, columns = [], []
        for row in range(len(guesses) + 1):
            end = len(tail) + row
            for word in self._bad_words.get(tokens[end - 1], ()):
                start = end - len(word) + 1
                if start >= 0 and tokens[start:end] == word[:-1]:
                    rows.append(row)
                    columns.append(word[-1])
        if rows:
            scores[rows, columns] = _BANNED
