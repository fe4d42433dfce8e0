"""Stop strings: the checker against a plain search, the rule, and the engine at every window."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jacobi_llm.configs.errors import UsageError
from jacobi_llm.infer import fill as fill_module
from jacobi_llm.infer.completion_text import CompletionText
from jacobi_llm.infer.detokenizer import decode
from jacobi_llm.infer.models import LoadedModel, load_tokenizer
from jacobi_llm.infer.request import DecodeParams
from jacobi_llm.infer.rule import Commit, FinishReason, commit
from jacobi_llm.infer.stopping import StopChecker
from tests.infer.decoding import decode_ar, make_engine, make_request, random_prompt, run_checked
from tests.tiny_models import tiny_loaded as build_loaded
from tests.tiny_models import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
ANSWER_LEN = 60


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def first_match(text: str, stops: Sequence[str], from_end: int = 0) -> tuple[int, int] | None:
    """(end, start) of the match that ends first, of those the one that starts first; ends up to ``from_end`` do not
    count.
    """
    found = [
        (match.start() + len(stop), match.start())
        for stop in stops
        for match in re.finditer(f"(?={re.escape(stop)})", text)
        if match.start() + len(stop) > from_end
    ]
    return min(found, default=None)


def cut_text(
    ids: Sequence[int], stops: Sequence[str], *, min_tokens: int = 0, tokenizer: Any = TOKENIZER
) -> tuple[int | None, str]:
    """What is left of a completion, by a search of its whole text: how many tokens (None: no match), and its text.

    The stop strings hold no replacement character, so half a character at an end cannot be part of a match.
    """
    text = decode(tokenizer, ids)
    match = first_match(text, stops, len(decode(tokenizer, ids[:min_tokens]).rstrip("\ufffd")) if min_tokens else 0)
    if match is None:
        return None, text
    end, start = match
    prefixes = (decode(tokenizer, ids[:number]) for number in range(1, len(ids) + 1))
    return next(n for n, prefix in enumerate(prefixes, start=1) if prefix[:end] == text[:end]), text[:start]


def held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that is a proper prefix of a stop string."""
    return max((n for stop in stops for n in range(len(stop)) if n and text.endswith(stop[:n])), default=0)


# ---------------------------------------------------------------- the checker

texts = st.text(alphabet="aab", max_size=40)
stop_sets = st.lists(st.text(alphabet="aab", min_size=1, max_size=6), min_size=1, max_size=4)


@settings(max_examples=400)
@given(pieces=st.lists(st.text(alphabet="aab", max_size=5), max_size=12), stops=stop_sets, min_tokens=st.integers(0, 6))
@example(pieces=["a", "a", "a"], stops=["aa"], min_tokens=2)
@example(pieces=["abab"], stops=["ab", "b"], min_tokens=1)
def test_checker_equals_a_search_of_the_whole_text(pieces: list[str], stops: list[str], min_tokens: int) -> None:
    """The match and what is visible depend on the text alone; nothing is held back without need."""
    checker = StopChecker(tuple(stops), min_tokens)
    text = "".join(pieces)
    match = first_match(text, stops, len("".join(pieces[:min_tokens])))
    shown, num_read = "", 0
    for piece in pieces:
        new, is_stop = checker.push(piece)
        shown += new
        num_read += len(piece)
        if is_stop:
            assert match is not None
            assert num_read - len(piece) < match[0] <= num_read
            assert shown == text[: match[1]]
            assert checker.finish() == ""
            return
        assert match is None or match[0] > num_read
        assert shown == text[: num_read - held_back(text[:num_read], stops)]
    assert match is None
    assert shown + checker.finish() == text


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("say STOP now", ("STOP",), "say "),
        ("say STOP now", ("STOP now", "STOP"), "say "),  # the longer one is listed first, the shorter one ends first
        ("abcd", ("bcd", "abcd"), ""),  # both end together: the one that starts first
        ("abcd", ("abcx", "bc"), "a"),  # one that fails does not hide one that begins inside it
        ("xx", ("y", "xxx"), "xx"),
        ("你好。END", ("。",), "你好"),
        ("a\n\nb", ("\n\n",), "a"),
    ],
)
def test_which_match_wins(text: str, stops: tuple[str, ...], shown: str) -> None:
    for size in (1, 2, len(text)):
        checker = StopChecker(stops)
        got = ""
        for start in range(0, len(text), size):
            new, is_stop = checker.push(text[start : start + size])
            got += new
            if is_stop:
                break
        assert got + checker.finish() == shown


def test_a_stop_string_of_the_first_tokens_does_not_count() -> None:
    checker = StopChecker(("ab",), min_tokens=3)
    assert [checker.push(text) for text in ("ab", "a", "", "b")] == [
        ("ab", False),
        ("", False),
        ("", False),
        ("", True),
    ]


def test_the_time_does_not_depend_on_the_stop_strings() -> None:
    """The worst case of a plain comparison: each new letter continues and then breaks 1,000 candidates."""
    checker = StopChecker(tuple("a" * 1000 + "b" * (n + 1) for n in range(16)))
    shown = "".join(checker.push("a" * 50)[0] for _ in range(400))
    assert len(shown) == 20000 - 1000
    assert checker.push("x") == ("a" * 1000 + "x", False)


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        (("",), "stop: empty string, which would end every answer at once"),
        (("a", ""), "stop: empty string"),
        (("a",) * 17, "stop: 17 strings; give at most 16"),
        (("a" * 1025,), "stop: a string of 1025 characters; give at most 1024"),
    ],
)
def test_s03_bounds(stop: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        DecodeParams(5, stop=stop)
    assert DecodeParams(5, stop=("a" * 1024,) * 16).stop
    assert DecodeParams(5).stop == ()


# ---------------------------------------------------------------- the text of a completion

# Bytes of whole and of broken characters, in tokens of one byte.
byte_ids = st.lists(
    st.one_of(
        st.sampled_from(["a", "b", "é", "你", "😀", "👩‍🚀"]).map(ids_of),
        st.integers(0, 258).map(lambda id: [id]),
    ),
    max_size=14,
).map(lambda parts: [id for part in parts for id in part])


@settings(max_examples=400)
@given(
    ids=byte_ids,
    stops=st.lists(st.text(alphabet="abé你😀\u200d", min_size=1, max_size=3), max_size=3),
    min_tokens=st.integers(0, 5),
    data=st.data(),
)
def test_any_cut_into_commits_gives_the_same_text(
    ids: list[int], stops: list[str], min_tokens: int, data: st.DataObject
) -> None:
    expected = cut_text(ids, stops, min_tokens=min_tokens)
    text = CompletionText(TOKENIZER, tuple(stops), min_tokens)
    shown, position, kept = "", 0, None
    while position < len(ids) and kept is None:
        chunk = ids[position : position + data.draw(st.integers(1, 9))]
        num_kept = text.stop_at(chunk)
        kept = None if num_kept is None else position + num_kept
        position += len(chunk)
        shown += text.pop()
        if kept is None:
            certain = decode(TOKENIZER, ids[:position])
            # Half a character is at most one replacement character; it may be a whole wrong one, too.
            assert len(certain) - held_back(certain.rstrip("\ufffd"), stops) - 3 <= len(shown)
    text.finish()
    shown += text.pop()
    assert (kept, shown) == expected
    assert text.text == shown
    text.finish()
    assert text.pop() == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer",
    [
        "Sure! 😀👩‍🚀 Here: 🇩🇪🏳️‍🌈.",
        "日本語の文章です。終わり。",
        "한국어 문장 — naïve café, 数学∑∫",
        "𝒳 ≠ 𝔸 \u00a0 \u200b tail",
    ],
)
def test_d18_real_tokenizer(answer: str) -> None:
    """Emoji and CJK characters take several tokens of the real vocabulary; any split gives the same text."""
    tokenizer = load_tokenizer("smollm2-135m")
    ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    assert len(ids) > len(answer) * 0.6
    draw = random.Random(0)
    for stops in ((), (answer[-1],), ("👩‍🚀 H", "終わ", "café"), (answer[3:6], answer[4:5]), ("no such text",)):
        expected = cut_text(ids, stops, tokenizer=tokenizer)
        for _ in range(20):
            text = CompletionText(tokenizer, stops)
            position, kept = 0, None
            deltas = []
            while position < len(ids) and kept is None:
                chunk = ids[position : position + draw.randint(1, 6)]
                num_kept = text.stop_at(chunk)
                kept = None if num_kept is None else position + num_kept
                position += len(chunk)
                deltas.append(text.pop())
            text.finish()
            deltas.append(text.pop())
            assert (kept, "".join(deltas)) == expected
            assert not any("\ufffd" in delta for delta in deltas)


# ---------------------------------------------------------------- the rule

A, B, EOS, C, D, E = 10, 11, 12, 13, 14, 15


def stop_behind(*tokens: int) -> Callable[[Sequence[int]], int | None]:
    """A stop string that the last of ``tokens`` completes, where they follow each other."""

    def stop_at(taken: Sequence[int]) -> int | None:
        for end in range(len(tokens), len(taken) + 1):
            if tuple(taken[end - len(tokens) : end]) == tokens:
                return end
        return None

    return stop_at


@pytest.mark.parametrize(
    ("left", "stop_at", "expected", "reason"),
    [
        (9, stop_behind(B), [A, B], FinishReason.STOP),  # before the stop token
        (9, stop_behind(A, B), [A, B], FinishReason.STOP),
        (9, stop_behind(C), [A, B, EOS], FinishReason.STOP),  # behind the stop token: never seen
        (2, stop_behind(B), [A, B], FinishReason.STOP),  # on the last token of the budget
        (1, stop_behind(B), [A], FinishReason.LENGTH),  # behind the budget: never seen
        (2, stop_behind(EOS), [A, B], FinishReason.LENGTH),
        (9, stop_behind(EOS), [A, B, EOS], FinishReason.STOP),  # a stop token has no text; it stops all the same
    ],
)
def test_d06_stop_string_against_budget_and_stop_token(
    left: int, stop_at: Callable[[Sequence[int]], int | None], expected: list[int], reason: FinishReason
) -> None:
    tokens = [A, B, EOS, C, D, E]
    result = commit(tokens[:-1], tokens, stop_token_ids=(EOS,), num_tokens_left=left, stop_at=stop_at)
    assert result == Commit(expected, [], reason)


def test_the_checker_sees_committed_tokens_only() -> None:
    """Rejected predictions, tokens behind the budget, and the stop token are not shown to it."""
    seen: list[list[int]] = []

    def stop_at(taken: Sequence[int]) -> None:
        seen.append(list(taken))

    commit([A, B, D], [A, B, C, D], stop_token_ids=(), num_tokens_left=9, stop_at=stop_at)
    commit([A, B, C], [A, B, C, D], stop_token_ids=(), num_tokens_left=2, stop_at=stop_at)
    commit([A, EOS, C], [A, EOS, C, D], stop_token_ids=(EOS,), num_tokens_left=9, stop_at=stop_at)
    commit([EOS], [EOS, C], stop_token_ids=(EOS,), num_tokens_left=9, stop_at=stop_at)
    assert seen == [[A, B, C], [A, B], [A], []]


# ---------------------------------------------------------------- the engine


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return build_loaded("llama")


@pytest.fixture(scope="module")
def answers(loaded: LoadedModel) -> dict[tuple[int, ...], list[int]]:
    """Endless answers; those of a random model are mostly letters, signs and broken bytes."""
    draw = random.Random(5)
    prompts = [random_prompt(draw, n) for n in (1, 3, 8, 15, 16, 17, 31)]
    return {prompt: decode_ar(loaded.model, prompt, ANSWER_LEN) for prompt in prompts}


def guess_right(monkeypatch: pytest.MonkeyPatch, answer: Sequence[int], error_rate: float = 0.0) -> None:
    """Let fresh guesses replay ``answer``, so that windows commit several tokens at once."""
    draw = random.Random(3)

    def fill(policy: Any, *, num_guesses: int, key: tuple[int, int, int], **_: Any) -> list[int]:
        padded = [*answer, *[3] * num_guesses]
        return [padded[t] if draw.random() >= error_rate else 3 for t in range(key[2], key[2] + num_guesses)]

    monkeypatch.setattr(fill_module, "fill_guesses", fill)


def expected_output(
    answer: Sequence[int], max_tokens: int, stops: Sequence[str], stop_ids: frozenset[int] = frozenset()
) -> tuple[list[int], str, FinishReason]:
    """Ids, text and finish reason of plain decoding."""
    budget = list(answer[:max_tokens])
    end = next((index for index, id in enumerate(budget) if id in stop_ids), len(budget))
    kept, text = cut_text(budget[:end], stops)
    if kept is not None:
        return budget[:kept], text, FinishReason.STOP
    return budget[: end + 1], text, FinishReason.STOP if end < len(budget) else FinishReason.LENGTH


def substrings(answer: Sequence[int]) -> list[str]:
    """Pieces of an answer that can be stop strings: without replacement characters."""
    text = decode(TOKENIZER, answer)
    parts = {text[start : start + n] for n in (1, 2, 3) for start in range(len(text) - n + 1)}
    return sorted(part for part in parts if part and "\ufffd" not in part)


@pytest.mark.parametrize("error_rate", [0.0, 0.3])
@pytest.mark.parametrize("window", [1, 2, 5, 16, 32])
def test_every_window_stops_where_plain_decoding_stops(
    loaded: LoadedModel,
    answers: dict[tuple[int, ...], list[int]],
    window: int,
    error_rate: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = random.Random(window)
    engine = make_engine(loaded, page_size=4)
    num_string_stops = 0
    for prompt, answer in answers.items():
        guess_right(monkeypatch, answer, error_rate)
        pool = substrings(answer)
        for _ in range(6):
            stops = (*draw.sample(pool, draw.randint(1, 3)), "no such text")
            stop_ids = frozenset(draw.sample(answer, draw.choice([0, 0, 1])))
            max_tokens = draw.randint(1, ANSWER_LEN)
            request = make_request(
                "a", prompt, max_tokens, window=window, stop=stops, stop_token_ids=stop_ids, keep_pages=True
            )
            tape = run_checked(engine, [request])
            output = tape.outputs["a"]
            ids, text, reason = expected_output(answer, max_tokens, stops, stop_ids)
            assert (list(output.token_ids), output.text, output.finish_reason) == (ids, text, reason)
            assert tape.streamed["a"] == ids
            assert engine._sequences["a"].num_computed == len(prompt) + len(ids) - 1
            engine.release("a")
            num_string_stops += ids != expected_output(answer, max_tokens, (), stop_ids)[0]
    assert num_string_stops > 10
    assert engine.pool.num_free == engine.pool.num_pages


def test_d07_stop_at_the_start_of_a_long_chunk(
    loaded: LoadedModel, answers: dict[tuple[int, ...], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 tokens are accepted at once, and the stop string lies in the first few."""
    for prompt, answer in answers.items():
        guess_right(monkeypatch, answer)
        for stop in substrings(answer[:4]):
            [output] = make_engine(loaded).generate([make_request("a", prompt, 50, window=32, stop=(stop,))])
            ids, text, _ = expected_output(answer, 50, (stop,))
            assert (list(output.token_ids), output.text, output.forward_passes) == (ids, text, 1)


def test_d07_stop_string_over_two_windows(
    loaded: LoadedModel, answers: dict[tuple[int, ...], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With right guesses and window 4 a pass commits tokens 4k .. 4k + 3; the string lies across such a border."""
    num_tested = 0
    for prompt, answer in answers.items():
        guess_right(monkeypatch, answer)
        for border in range(4, 40, 4):
            stop = decode(TOKENIZER, answer[border - 1 : border + 1])
            if len(stop) != 2 or "\ufffd" in stop or stop in decode(TOKENIZER, answer[:border]):
                continue
            request = make_request("a", prompt, 50, window=4, stop=(stop,))
            tape = run_checked(make_engine(loaded), [request])
            output = tape.outputs["a"]
            assert list(output.token_ids) == answer[: border + 1]
            assert output.text == decode(TOKENIZER, answer[: border - 1])
            assert output.commit_lengths == (*[4] * (border // 4), 1)
            num_tested += 1
    assert num_tested > 3


def test_a_stop_token_has_no_text(loaded: LoadedModel, answers: dict[tuple[int, ...], list[int]]) -> None:
    """Also when it is an ordinary letter; and without stop strings or a wish for text there is no text at all."""
    prompt, answer = next(iter(answers.items()))
    stop_id = answer[9]
    end = answer.index(stop_id)
    engine = make_engine(loaded)
    request = make_request("a", prompt, 50, stop_token_ids=frozenset({stop_id}), stop=("no such text",))
    [output] = engine.generate([request])
    assert list(output.token_ids) == answer[: end + 1]
    assert output.text == decode(TOKENIZER, answer[:end])
    [output] = engine.generate([make_request("a", prompt, 50)])
    assert output.text is None


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6))
def test_any_mix_with_stops_equals_plain_decoding(
    loaded: LoadedModel, answers: dict[tuple[int, ...], list[int]], seed: int
) -> None:
    """Requests with and without stops, in few pages (preempted and recomputed), each as if it were alone."""
    draw = random.Random(seed)
    requests, expected = [], {}
    for number in range(5):
        prompt, answer = draw.choice(list(answers.items()))
        stops = tuple(draw.sample(substrings(answer), draw.choice([0, 1, 2])))
        max_tokens = draw.randint(1, ANSWER_LEN)
        window = draw.choice([1, 3, 8, 17])
        requests.append(make_request(str(number), prompt, max_tokens, window=window, stop=stops))
        expected[str(number)] = expected_output(answer, max_tokens, stops)
    engine = make_engine(loaded, num_pages=30, page_size=4, max_num_rows=draw.choice([5, 2048]))
    tape = run_checked(engine, requests, join_at=[draw.randint(0, 9) for _ in requests])
    for request in requests:
        output = tape.outputs[request.id]
        ids, text, reason = expected[request.id]
        assert (list(output.token_ids), output.finish_reason) == (ids, reason)
        assert output.text == (text if request.params.stop else None)
    assert engine.pool.num_free == engine.pool.num_pages
