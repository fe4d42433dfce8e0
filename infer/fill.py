"""Fill policies: guesses that no earlier pass wrote. They change the speed of decoding, never its output."""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

from jacobi_llm.configs.schema import FillPolicy
from jacobi_llm.infer.ngram_index import END, LONGEST, Contest, NgramMemory, key_of

if TYPE_CHECKING:
    from jacobi_llm.infer.request import Sequence as RequestSequence


class GuessKind(IntEnum):
    """Where a guess comes from, as far as it says how often such guesses are right."""

    CARRIED = 0  # the last pass predicted it
    MATCHED = 1  # the policy has seen what came before it, at least two tokens of it
    BLIND = 2


class Filler(Protocol):
    """Writes the guesses that the last pass left open."""

    def kind(self, sequence: RequestSequence) -> GuessKind:
        """Kind of the guesses that would follow the carried ones now."""

    def fill(self, sequence: RequestSequence, kept: Sequence[int], num_guesses: int) -> list[int]:
        """Write guesses.

        Args:
            sequence: the request; what it has committed.
            kept: guesses that stand between its last committed token and the first guess wanted.
            num_guesses: how many, at least 1.
        """

    def learn(self, sequence: RequestSequence, num_guesses: int, num_accepted: int) -> None:
        """Take note of a commit.

        Args:
            sequence: the request, which goes on; its carried guesses are new, and may be dropped for better ones.
            num_guesses: guesses that were tried.
            num_accepted: right ones at the front.
        """


class FixedFill:
    """Guesses by a policy that looks at nothing but the prompt and the last token: :func:`fill_guesses`."""

    def __init__(self, policy: FillPolicy) -> None:
        self.policy = policy

    def kind(self, sequence: RequestSequence) -> GuessKind:
        return GuessKind.BLIND

    def fill(self, sequence: RequestSequence, kept: Sequence[int], num_guesses: int) -> list[int]:
        params = sequence.request.params
        return fill_guesses(
            self.policy,
            prompt_ids=sequence.request.prompt_ids,
            last_token_id=kept[-1] if kept else sequence.last_token_id,
            num_guesses=num_guesses,
            key=(params.seed, params.choice, len(sequence.completion_ids) + len(kept)),
        )

    def learn(self, sequence: RequestSequence, num_guesses: int, num_accepted: int) -> None:
        """Nothing to note."""


class NgramFill:
    """Copies what followed the last three, two or one tokens when they last occurred; repeats the last one otherwise.

    Looked up are prompt and output (prompt lookup: Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding), then
    predictions that were once rejected (the n-gram pool of lookahead decoding: Fu et al. 2024, arXiv 2402.02057, and
    the rejection recycling of Jacobi Forcing). A copy that reaches the end of the text goes on with the guesses before
    it, so that a text with a period is continued for ever.

    Where at least the last two committed tokens have been seen, a copy may be better than the carried guesses, and then
    those are dropped (they stay among the rejected ones). Which is better is counted: for each length of the run that
    was found, the guesses accepted in a pass with copies and in a pass with carried guesses. A request leans on what
    all requests of this filler have seen, and every so often the other choice is tried.
    """

    def __init__(self) -> None:
        self._seen = Contest()

    def kind(self, sequence: RequestSequence) -> GuessKind:
        memory = _memory_of(sequence)
        is_known = memory.text.knows_two(_key_of_end(memory, sequence.carried))
        return GuessKind.MATCHED if is_known else GuessKind.BLIND

    def fill(self, sequence: RequestSequence, kept: Sequence[int], num_guesses: int) -> list[int]:
        return copy_guesses(_memory_of(sequence), kept, num_guesses)

    def learn(self, sequence: RequestSequence, num_guesses: int, num_accepted: int) -> None:
        if not num_guesses:
            if sequence.ngrams is not None:
                sequence.ngrams.choice = None
            return
        memory = _memory_of(sequence)
        if memory.choice is not None:
            memory.contest.add(memory.choice, num_accepted)
            self._seen.add(memory.choice, num_accepted)
            memory.choice = None
        if sequence.carried:
            memory.add_rejected(sequence.last_token_id, sequence.carried)
            num_matched = memory.longest_match(key_of(memory.text.tokens))
            if num_matched > 1:
                drops = memory.contest.drops(num_matched, self._seen)
                memory.choice = (num_matched, drops)
                if drops:
                    sequence.carried = []


def copy_guesses(memory: NgramMemory, kept: Sequence[int], num_guesses: int) -> list[int]:
    """Guesses after the text of ``memory`` and ``kept``, as :class:`NgramFill` describes; fewer are their beginning.

    Args:
        memory: has read at least one token.
        kept: guesses that stand between the text and the first guess wanted.
        num_guesses: how many, 0 or more.
    """
    text = memory.text.tokens
    guesses = list(kept)
    num_wanted = len(kept) + num_guesses
    while len(guesses) < num_wanted:
        found = memory.find(_key_of_end(memory, guesses), len(text) + len(guesses))
        if found is None:
            last_token_id = guesses[-1] if guesses else text[-1]
            guesses += [last_token_id] * (num_wanted - len(guesses))
        elif found[0] is text:
            _copy_text(text, found[1], guesses, num_wanted)
        else:
            _copy_run(found[0], found[1], guesses, num_wanted)
    return guesses[len(kept) :]


def make_fillers() -> dict[FillPolicy, Filler]:
    """One filler for each policy."""
    return {
        FillPolicy.REPEAT_LAST: FixedFill(FillPolicy.REPEAT_LAST),
        FillPolicy.PROMPT_DRAW: FixedFill(FillPolicy.PROMPT_DRAW),
        FillPolicy.NGRAM: NgramFill(),
    }


def fill_guesses(
    policy: FillPolicy,
    *,
    prompt_ids: Sequence[int],
    last_token_id: int,
    num_guesses: int,
    key: tuple[int, int, int],
) -> list[int]:
    """Write ``num_guesses`` token ids by a policy that knows no more than this; collection and training use it too.

    Args:
        policy: repeat-last repeats ``last_token_id``; prompt-draw draws from the prompt with replacement, as CLLM's
            training data does (arXiv 2403.00835, algorithm 1).
        prompt_ids: the prompt, not empty.
        last_token_id: the token before the first guess.
        num_guesses: how many, 0 or more.
        key: seed, request or source index, completion position of the first guess; the draw depends on nothing else.

    Raises:
        ValueError: ngram, which needs a request's own text (:class:`NgramFill`).
    """
    match policy:
        case FillPolicy.REPEAT_LAST:
            return [last_token_id] * num_guesses
        case FillPolicy.PROMPT_DRAW:
            return random.Random("/".join(map(str, key))).choices(prompt_ids, k=num_guesses)
        case FillPolicy.NGRAM:
            raise ValueError("n-gram guesses need a request's own text")


def _memory_of(sequence: RequestSequence) -> NgramMemory:
    if sequence.ngrams is None:
        sequence.ngrams = NgramMemory()
    sequence.ngrams.catch_up(sequence.request.prompt_ids, sequence.completion_ids)
    return sequence.ngrams


def _key_of_end(memory: NgramMemory, guesses: Sequence[int]) -> int:
    """Key of the last tokens of the text and the guesses after it."""
    if len(guesses) >= LONGEST:
        return key_of(guesses)
    return key_of([*memory.text.tokens[-LONGEST:], *guesses])


def _copy_text(text: Sequence[int], place: int, guesses: list[int], num_wanted: int) -> None:
    num_missing = num_wanted - len(guesses)
    guesses += text[place : place + num_missing]
    # At the end of the text the copy goes on with the guesses behind it, its own among them.
    for index in range(num_wanted - len(guesses)):
        guesses.append(guesses[index])


def _copy_run(tokens: Sequence[int], place: int, guesses: list[int], num_wanted: int) -> None:
    for token in tokens[place : place + num_wanted - len(guesses)]:
        if token == END:
            break
        guesses.append(token)
