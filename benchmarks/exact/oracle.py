"""Guesses that are mostly right: without them hardly a window of a model that was not trained for it is accepted.

A random model's windows commit one token, a base model's seldom two, and then most of what can go wrong in a window
stays unseen: stops in its middle, rows whose prefix are accepted guesses, K/V that earlier passes wrote.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from jacobi_llm.infer.engine import LLMEngine
from jacobi_llm.infer.fill import Filler, GuessKind
from jacobi_llm.infer.request import Sequence as RequestSequence

ERROR_RATES = (0.0, 0.1, 0.3)
# Behind the end of an answer an oracle makes something up, as far as the widest window.
_NUM_INVENTED = 64


def told_with_errors(answer_ids: Sequence[int], vocab_size: int, draw: random.Random) -> tuple[int, ...]:
    """What an oracle tells of an answer: a share of tokens is wrong, and it does not know where the answer ends."""
    error_rate = draw.choice(ERROR_RATES)
    told = [draw.randrange(vocab_size) if draw.random() < error_rate else token for token in answer_ids]
    return (*told, *(draw.randrange(vocab_size) for _ in range(_NUM_INVENTED)))


class OracleFill:
    """Tells the answers of the requests it knows; leaves the others to a policy.

    Attributes:
        told: by request id.
    """

    def __init__(self, policy: Filler, told: Mapping[str, Sequence[int]]) -> None:
        self.policy = policy
        self.told = told

    @classmethod
    def install(cls, engine: LLMEngine, told: Mapping[str, Sequence[int]]) -> None:
        """Put an oracle before each policy of ``engine``, in place of the last one."""
        fillers = engine.scheduler.fillers
        for name, filler in fillers.items():
            fillers[name] = cls(filler.policy if isinstance(filler, cls) else filler, told)

    def kind(self, sequence: RequestSequence) -> GuessKind:
        return GuessKind.MATCHED if sequence.request.id in self.told else self.policy.kind(sequence)

    def fill(self, sequence: RequestSequence, kept: Sequence[int], num_guesses: int) -> list[int]:
        told = self.told.get(sequence.request.id)
        if told is None:
            return self.policy.fill(sequence, kept, num_guesses)
        start = len(sequence.completion_ids) + len(kept)
        return list(told[start : start + num_guesses])

    def learn(self, sequence: RequestSequence, num_guesses: int, num_accepted: int) -> None:
        if sequence.request.id in self.told:
            # Predictions after a wrong guess are wrong too, and would come before what the oracle knows.
            sequence.carried = []
        else:
            self.policy.learn(sequence, num_guesses, num_accepted)
