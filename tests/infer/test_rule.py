"""The decoding rule against a plain one-token-at-a-time oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jacobi_llm.infer.rule import Commit, FinishReason, commit, count_accepted, first_wrong, next_window

NextToken = Callable[[Sequence[int]], int]
A, B, STOP, C, D, E, F = 10, 11, 12, 13, 14, 15, 16


def hashed_model(seed: int, vocab: int, order: int) -> NextToken:
    """A deterministic model: the next token is a hash of the last ``order`` tokens."""

    def next_token(prefix: Sequence[int]) -> int:
        return hash((seed, *prefix[-order:])) % vocab

    return next_token


def decode_ar(
    next_token: NextToken, prompt: list[int], max_tokens: int, stops: frozenset[int]
) -> tuple[list[int], FinishReason]:
    output: list[int] = []
    while len(output) < max_tokens:
        output.append(next_token(prompt + output))
        if output[-1] in stops:
            return output, FinishReason.STOP
    return output, FinishReason.LENGTH


def predict(next_token: NextToken, prefix: list[int], guesses: list[int]) -> list[int]:
    """p_0..p_(n-1) of a window, as one forward pass computes them."""
    return [next_token(prefix + guesses[:i]) for i in range(len(guesses) + 1)]


tokens = st.integers(0, 5)


@given(
    seed=st.integers(0, 10**6),
    vocab=st.integers(1, 6),
    order=st.integers(1, 4),
    prompt=st.lists(tokens, min_size=1, max_size=6),
    max_tokens=st.integers(1, 40),
    stops=st.frozensets(tokens, max_size=2),
    data=st.data(),
)
def test_any_guesses_give_the_ar_output(
    seed: int, vocab: int, order: int, prompt: list[int], max_tokens: int, stops: frozenset[int], data: st.DataObject
) -> None:
    next_token = hashed_model(seed, vocab, order)
    output: list[int] = []
    carried: list[int] = []
    finish_reason = None
    num_passes = 0
    while finish_reason is None:
        num_guesses = data.draw(st.integers(0, 9))
        guesses = next_window(carried, num_guesses, lambda kept, n: data.draw(st.lists(tokens, min_size=n, max_size=n)))
        assert len(guesses) == num_guesses
        result = commit(
            guesses,
            predict(next_token, prompt + output, guesses),
            stop_token_ids=stops,
            num_tokens_left=max_tokens - len(output),
        )
        assert result.token_ids
        assert len(result.next_guesses) <= num_guesses
        output += result.token_ids
        carried, finish_reason = result.next_guesses, result.finish_reason
        num_passes += 1
    assert (output, finish_reason) == decode_ar(next_token, prompt, max_tokens, stops)
    assert num_passes <= len(output)


@given(seed=st.integers(0, 10**6), length=st.integers(1, 24), data=st.data())
def test_a_block_converges_within_its_length(seed: int, length: int, data: st.DataObject) -> None:
    """With a window that shrinks to the block's end, n tokens take at most n passes; 1 when guessed right."""
    next_token = hashed_model(seed, 6, 3)
    target, _ = decode_ar(next_token, [1], length, frozenset())
    first = data.draw(st.one_of(st.just(target[:-1]), st.lists(tokens, min_size=length - 1, max_size=length - 1)))
    output: list[int] = []
    guesses, num_passes = list(first), 0
    while len(output) < length:
        result = commit(
            guesses,
            predict(next_token, [1, *output], guesses),
            stop_token_ids=(),
            num_tokens_left=length - len(output),
        )
        output += result.token_ids
        guesses = result.next_guesses[: length - len(output) - 1]
        num_passes += 1
    assert output == target
    assert num_passes == 1 if first == target[:-1] else num_passes <= length


@given(
    seed=st.integers(0, 10**6), prompt=st.lists(tokens, min_size=1, max_size=4), guesses=st.lists(tokens, max_size=9)
)
def test_carried_predictions_are_the_next_jacobi_iterate(seed: int, prompt: list[int], guesses: list[int]) -> None:
    next_token = hashed_model(seed, 6, 2)
    predictions = predict(next_token, prompt, guesses)
    result = commit(guesses, predictions, stop_token_ids=(), num_tokens_left=1000)
    assert result.token_ids + result.next_guesses == predictions


@given(guesses=st.lists(tokens, max_size=9), data=st.data())
def test_count_accepted_is_the_longest_proved_run(guesses: list[int], data: st.DataObject) -> None:
    predictions = data.draw(st.lists(tokens, min_size=len(guesses) + 1, max_size=len(guesses) + 1))
    accepted = count_accepted(guesses, predictions)
    assert 1 <= accepted <= len(predictions)
    assert guesses[: accepted - 1] == predictions[: accepted - 1]
    assert accepted == len(predictions) or guesses[accepted - 1] != predictions[accepted - 1]


@pytest.mark.parametrize("num_predictions", [0, 2, 4])
def test_count_accepted_refuses_unequal_lengths(num_predictions: int) -> None:
    with pytest.raises(ValueError, match=f"need 3 predictions, got {num_predictions}"):
        count_accepted([1, 2], [1] * num_predictions)


def all_right(tokens: list[int], num_tokens_left: int, stops: tuple[int, ...] = (STOP,)) -> Commit:
    """Commit a chunk whose guesses are all right."""
    return commit(tokens[:-1], tokens, stop_token_ids=stops, num_tokens_left=num_tokens_left)


@pytest.mark.parametrize(
    ("chunk", "left", "expected", "reason"),
    [
        ([A, B, STOP, C, D, E], 5, [A, B, STOP], FinishReason.STOP),  # the cap lies behind the stop: stop wins
        ([A, B, C, D, STOP, E], 5, [A, B, C, D, STOP], FinishReason.STOP),  # both at 5: stop wins
        ([A, B, C, D, E, STOP], 5, [A, B, C, D, E], FinishReason.LENGTH),  # stop behind the cap: never seen
        ([STOP, A, B], 1, [STOP], FinishReason.STOP),
        ([A, STOP, B], 1, [A], FinishReason.LENGTH),
    ],
)
def test_d06_stop_against_budget(chunk: list[int], left: int, expected: list[int], reason: FinishReason) -> None:
    assert all_right(chunk, left) == Commit(expected, [], reason)


@pytest.mark.parametrize("window", range(2, 17))
def test_d06_budget_is_met_exactly(window: int) -> None:
    for budget in (1, window - 1, window, window + 1):
        result = all_right(list(range(100, 100 + window)), budget)
        if budget <= window:
            assert result == Commit(list(range(100, 100 + budget)), [], FinishReason.LENGTH)
        else:
            assert result == Commit(list(range(100, 100 + window)), [], None)


@pytest.mark.parametrize("k", range(1, 17))
def test_d05_eos_at_every_place_of_the_window(k: int) -> None:
    chunk = list(range(100, 116))
    eos = chunk[k - 1]
    expected = Commit(chunk[:k], [], FinishReason.STOP)
    assert all_right(chunk, 1000, stops=(eos,)) == expected
    assert all_right(chunk, 1000, stops=(eos, 7)) == expected
    assert all_right(chunk, 1000, stops=(chunk[-1], eos)) == expected
    assert all_right(chunk, 1000, stops=()) == Commit(chunk, [], None)


def test_eos_predicted_by_a_rejected_row_does_not_stop() -> None:
    result = commit([A, B, C], [A, F, STOP, STOP], stop_token_ids=(STOP,), num_tokens_left=9)
    assert result == Commit([A, F], [STOP, STOP], None)


def test_guessed_eos_that_is_wrong_does_not_stop() -> None:
    result = commit([STOP, B], [A, STOP, STOP], stop_token_ids=(STOP,), num_tokens_left=9)
    assert result == Commit([A], [STOP, STOP], None)


@pytest.mark.parametrize("max_tokens", range(1, 18))
def test_k04_no_overshoot_with_window_16_and_two_eos(max_tokens: int) -> None:
    next_token = hashed_model(3, 50, 3)
    for stops in (frozenset[int](), frozenset({7}), frozenset({7, 12})):
        expected = decode_ar(next_token, [1], max_tokens, stops)
        output: list[int] = []
        reason = None
        while reason is None:
            # guesses that are always right, and longer than the budget
            guesses = decode_ar(next_token, [1, *output], 15, frozenset())[0]
            result = commit(
                guesses,
                predict(next_token, [1, *output], guesses),
                stop_token_ids=stops,
                num_tokens_left=max_tokens - len(output),
            )
            output += result.token_ids
            reason = result.finish_reason
        assert (output, reason) == expected


def test_k04_window_1_makes_progress() -> None:
    assert commit([], [A], stop_token_ids=(), num_tokens_left=5) == Commit([A], [], None)


@pytest.mark.parametrize("left", [0, -1])
def test_no_budget_is_refused(left: int) -> None:
    with pytest.raises(ValueError, match="without budget"):
        commit([], [A], stop_token_ids=(), num_tokens_left=left)


def test_next_window_carries_first_and_fills_the_rest() -> None:
    calls: list[tuple[list[int], int]] = []

    def fill(kept: list[int], num_missing: int) -> list[int]:
        calls.append((list(kept), num_missing))
        return [F] * num_missing

    assert next_window([A, B], 4, fill) == [A, B, F, F]
    assert next_window([A, B, C], 2, fill) == [A, B]
    assert next_window([A, B], 2, fill) == [A, B]
    assert next_window([A], 0, fill) == []
    assert next_window([], 2, fill) == [F, F]
    assert calls == [([A, B], 2), ([], 2)]


def test_next_window_leaves_the_carried_list_alone() -> None:
    carried = [A, B]
    window = next_window(carried, 2, lambda kept, n: [])
    window.append(C)
    assert carried == [A, B]


@settings(max_examples=50)
@given(target=st.lists(tokens, max_size=9), data=st.data())
def test_first_wrong(target: list[int], data: st.DataObject) -> None:
    state = data.draw(st.lists(tokens, min_size=len(target), max_size=len(target)))
    d = first_wrong(state, target)
    assert state[:d] == target[:d]
    assert d == len(target) or state[d] != target[d]


def test_first_wrong_refuses_unequal_lengths() -> None:
    with pytest.raises(ValueError, match="argument 2 is"):
        first_wrong([1], [1, 2])
