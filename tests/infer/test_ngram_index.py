"""The n-gram index against a plain search, and the guesses copied with it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jacobi_llm.configs.schema import FillPolicy
from jacobi_llm.infer.fill import GuessKind, NgramFill, fill_guesses, make_fillers
from jacobi_llm.infer.ngram_index import LONGEST, LONGEST_RUN, MOST_REJECTED, NgramIndex, NgramMemory, key_of
from jacobi_llm.infer.request import DecodeParams, Request
from jacobi_llm.infer.request import Sequence as RequestSequence

TOKENS = st.lists(st.integers(0, 3), max_size=30)


def search(text: Sequence[int], run: Sequence[int]) -> int | None:
    """Place behind the last occurrence of ``run`` in ``text`` that something follows."""
    for place in range(len(text) - 1, len(run) - 1, -1):
        if list(text[place - len(run) : place]) == list(run):
            return place
    return None


def sequence_of(
    prompt_ids: Sequence[int], completion_ids: Sequence[int] = (), carried: Sequence[int] = ()
) -> RequestSequence:
    request = Request("a", tuple(prompt_ids), DecodeParams(100, fill=FillPolicy.NGRAM))
    return RequestSequence(request, 0.0, completion_ids=list(completion_ids), carried=list(carried))


@given(parts=st.lists(TOKENS, max_size=5), run=st.lists(st.integers(0, 3), min_size=1, max_size=LONGEST))
def test_the_index_finds_what_a_search_finds(parts: list[list[int]], run: list[int]) -> None:
    index = NgramIndex()
    for part in parts:
        index.append(part)
    text = [token for part in parts for token in part]
    assert index.tokens == text
    assert index.find(key_of(run), len(run)) == search(text, run)


@given(runs=st.lists(TOKENS, max_size=6), run=st.lists(st.integers(0, 3), min_size=1, max_size=LONGEST))
def test_no_run_goes_over_an_end(runs: list[list[int]], run: list[int]) -> None:
    index = NgramIndex()
    for part in runs:
        index.append(part)
        index.end_run()
    text = [token for part in runs for token in [*part, -1]]
    place = search(text, run)
    while place is not None and text[place] == -1:
        place = search(text[:place], run)
    assert index.find(key_of(run), len(run)) == place


def expected_guesses(text: Sequence[int], kept: Sequence[int], num_guesses: int) -> list[int]:
    """Copy from the last occurrence of the longest known run, token by token; repeat the last token without one."""
    known = [*text, *kept]
    for length in range(min(LONGEST, len(known)), 0, -1):
        place = search(text, known[-length:])
        if place is not None:
            for offset in range(num_guesses):
                known.append(known[place + offset])
            return known[len(text) + len(kept) :]
    return [known[-1]] * num_guesses


@given(
    prompt_ids=st.lists(st.integers(0, 3), min_size=1, max_size=20),
    completion_ids=TOKENS,
    kept=st.lists(st.integers(0, 4), max_size=6),
    num_guesses=st.integers(1, 20),
)
def test_guesses_are_copied_from_the_text(
    prompt_ids: list[int], completion_ids: list[int], kept: list[int], num_guesses: int
) -> None:
    sequence = sequence_of(prompt_ids)
    filler = NgramFill()
    for token in completion_ids:
        filler.fill(sequence, kept, 1)
        sequence.completion_ids.append(token)
    guesses = filler.fill(sequence, kept, num_guesses)
    assert guesses == expected_guesses([*prompt_ids, *completion_ids], kept, num_guesses)
    assert guesses == NgramFill().fill(sequence_of(prompt_ids, completion_ids), kept, num_guesses)


def test_a_period_goes_on_for_ever() -> None:
    assert NgramFill().fill(sequence_of([9, 1, 2, 3, 1, 2, 3]), [], 7) == [1, 2, 3, 1, 2, 3, 1]
    assert NgramFill().fill(sequence_of([9, 1, 2, 3, 1]), [2], 4) == [3, 1, 2, 3]
    assert NgramFill().fill(sequence_of([5]), [], 3) == [5, 5, 5]


def test_rejected_guesses_are_used_again() -> None:
    """What followed a token once, and was then rejected, is the guess when nothing in the text has followed it."""
    filler = NgramFill()
    sequence = sequence_of([1, 2, 3], [4], carried=[5, 6, 7])
    filler.learn(sequence, 3, 0)
    assert sequence.carried == [5, 6, 7], "nothing better is known"
    sequence.completion_ids += [8, 4]
    sequence.carried = []
    assert filler.fill(sequence, [], 1) == [8], "the text comes before rejected guesses"
    assert filler.fill(sequence, [4, 5], 4) == [6, 7, 7, 7], "behind a run that has ended, the last token"


def test_the_kind_tells_whether_the_text_knows_two_tokens() -> None:
    filler = NgramFill()
    assert filler.kind(sequence_of([1, 2, 3, 1, 2])) is GuessKind.MATCHED
    assert filler.kind(sequence_of([1, 2, 3, 2])) is GuessKind.BLIND
    assert filler.kind(sequence_of([1, 2, 3, 4, 1], carried=[2])) is GuessKind.MATCHED
    assert filler.kind(sequence_of([1])) is GuessKind.BLIND


@pytest.mark.parametrize("copies_are_right", [True, False])
def test_carried_guesses_give_way_to_copies_that_are_better(copies_are_right: bool) -> None:
    """Of two kinds of guess, one is right in half of all passes and the other never: the right one is used mostly."""
    filler = NgramFill()
    sequence = sequence_of([1, 2, 3] * 3)
    num_dropped, num_accepted = 0, 0
    for step in range(200):
        sequence.completion_ids.append(sequence.completion_ids[-1] % 3 + 1 if sequence.completion_ids else 1)
        sequence.carried = [9, 9, 9]
        filler.learn(sequence, 3, num_accepted)
        is_dropped = not sequence.carried
        num_dropped += is_dropped
        num_accepted = 3 * (is_dropped == copies_are_right and step % 2)
    assert num_dropped > 150 if copies_are_right else num_dropped < 50
    assert 0 < num_dropped < 200, "the other kind is tried too"


def test_carried_guesses_stay_where_nothing_is_copied() -> None:
    filler = NgramFill()
    sequence = sequence_of([1, 2, 3, 4], [5], carried=[6, 7])
    filler.learn(sequence, 2, 0)
    assert sequence.carried == [6, 7]
    idle = sequence_of([1, 2, 1, 2], [1], carried=[])
    filler.learn(idle, 0, 0)
    assert idle.ngrams is None, "a request at window 1 pays nothing"


def test_rejected_guesses_are_bounded() -> None:
    memory = NgramMemory()
    for number in range(3000):
        memory.add_rejected(number, range(number, number + 40))
        assert len(memory.rejected.tokens) <= MOST_REJECTED
    assert memory.find(key_of([2999]), 1) is not None
    memory.add_rejected(1, range(100, 200))
    tokens, place = memory.find(key_of([1, 100]), 2) or ([], 0)
    assert tokens[place : tokens.index(-1, place)] == list(range(101, 100 + LONGEST_RUN - 2))


def test_large_token_ids_are_kept_apart() -> None:
    index = NgramIndex()
    index.append([2**20 - 1, 5, 0, 2**20 - 1, 7])
    assert index.find(key_of([2**20 - 1]), 1) == 4
    assert index.find(key_of([0, 2**20 - 1]), 2) == 4
    assert index.find(key_of([1, 2**20 - 1]), 2) is None


def test_every_policy_has_a_filler_and_collection_refuses_this_one() -> None:
    assert set(make_fillers()) == set(FillPolicy)
    with pytest.raises(ValueError, match="a request's own text"):
        fill_guesses(FillPolicy.NGRAM, prompt_ids=[1], last_token_id=1, num_guesses=1, key=(0, 0, 0))


@pytest.mark.parametrize("policy", [FillPolicy.REPEAT_LAST, FillPolicy.PROMPT_DRAW])
def test_the_other_fillers_are_the_functions_of_collection(policy: FillPolicy) -> None:
    sequence = sequence_of([3, 4, 5], [6, 7])
    for kept in ([], [8, 9]):
        assert make_fillers()[policy].fill(sequence, kept, 5) == fill_guesses(
            policy, prompt_ids=(3, 4, 5), last_token_id=[7, *kept][-1], num_guesses=5, key=(0, 0, 2 + len(kept))
        )
