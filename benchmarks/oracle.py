"""Guesses of a set quality: a filler that replays the known answer, with mistakes at a set rate."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from jacobi_llm.configs.schema import FillPolicy
from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.fill import GuessKind
from jacobi_llm.infer.request import Sequence


@dataclass(frozen=True)
class _Answer:
    """Tokens of an answer as the oracle tells them: some are wrong, the same ones whenever it is asked."""

    told_ids: tuple[int, ...]


class OracleFiller:
    """Fills in the answer of each prompt it knows; past the end of an answer it repeats the last token.

    Which tokens are wrong depends on the prompt's seed and the position alone. What the model predicts behind a wrong
    guess is carried on as usual, so the acceptance that a request sees is not quite one minus the error rate.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._answers: dict[tuple[int, ...], _Answer] = {}

    def add(self, prompt_ids: Seq[int], answer_ids: Seq[int], error_rate: float, *, seed: int = 0) -> None:
        """Make an answer known.

        Args:
            prompt_ids: the prompt.
            answer_ids: what AR decoding answers.
            error_rate: share of tokens told wrong, 0 to 1.
            seed: of the draw of wrong tokens.
        """
        draw = random.Random(seed)
        told = tuple(
            (token + draw.randrange(1, self.vocab_size)) % self.vocab_size if draw.random() < error_rate else token
            for token in answer_ids
        )
        self._answers[tuple(prompt_ids)] = _Answer(told)

    def install(self, engine: LLMEngine) -> None:
        """Write the guesses of all requests of ``engine``, whatever their fill policy."""
        engine.scheduler.fillers = dict.fromkeys(FillPolicy, self)

    def kind(self, sequence: Sequence) -> GuessKind:
        return GuessKind.MATCHED

    def fill(self, sequence: Sequence, kept: Seq[int], num_guesses: int) -> list[int]:
        told = self._answers[sequence.request.prompt_ids].told_ids
        start = len(sequence.completion_ids) + len(kept)
        guesses = list(told[start : start + num_guesses])
        return guesses + [told[-1]] * (num_guesses - len(guesses))

    def learn(self, sequence: Sequence, num_guesses: int, num_accepted: int) -> None:
        """An oracle knows."""
