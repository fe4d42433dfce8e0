"""Detokenising piece by piece, and the coloured view of an answer."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from jacobi_llm.infer.detokenizer import Detokenizer, decode, token_texts
from jacobi_llm.infer.view import render_ansi, render_html
from tests.tiny_models import tiny_tokenizer

BYTE_TOKENIZER = tiny_tokenizer()
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer in SentencePiece's manner: a space before each word, single bytes for what has no token."""
    words = ["<s>", "\u2581Hello", "\u2581world", "!", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


def ids_of(text: str) -> list[int]:
    return list(BYTE_TOKENIZER(text, add_special_tokens=False)["input_ids"])


@given(st.text(max_size=40), st.integers(1, 5))
def test_pieces_join_to_the_text_and_never_show_half_a_character(text: str, step: int) -> None:
    ids = ids_of(text)
    detokenizer = Detokenizer(BYTE_TOKENIZER)
    pieces = [detokenizer.push(ids[start : start + step]) for start in range(0, len(ids), step)]
    assert "".join(pieces) + detokenizer.finish() == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 258), max_size=40))
def test_any_bytes_give_the_text_of_the_whole(ids: list[int]) -> None:
    assert "".join(token_texts(BYTE_TOKENIZER, ids)) == decode(BYTE_TOKENIZER, ids)


def test_text_goes_on_after_broken_bytes() -> None:
    broken = ids_of("é")[:1]
    detokenizer = Detokenizer(BYTE_TOKENIZER)
    assert detokenizer.push(broken) == ""
    assert detokenizer.push(ids_of("a")) == "\ufffda"
    assert detokenizer.push(ids_of("b")) == "b"


def test_a_cut_character_appears_at_the_end() -> None:
    detokenizer = Detokenizer(BYTE_TOKENIZER)
    assert detokenizer.push(ids_of("ab😀")[:-1]) == "ab"
    assert detokenizer.finish() == "\ufffd"


def test_special_tokens_are_left_out_unless_asked_for() -> None:
    ids = [*ids_of("ok"), 2]
    assert decode(BYTE_TOKENIZER, ids) == "ok"
    assert token_texts(BYTE_TOKENIZER, ids) == ["o", "k", ""]
    assert token_texts(BYTE_TOKENIZER, ids, keep_special=True) == ["o", "k", "<|im_end|>"]


def test_spaces_between_words_survive_a_tokenizer_that_strips_the_first() -> None:
    tokenizer: PreTrainedTokenizerBase = byte_fallback_tokenizer()
    ids = [1, 2, 3, 2, *(4 + byte for byte in "é".encode()), 1]
    assert token_texts(tokenizer, ids) == ["Hello", " world", "!", " world", "", "é", " Hello"]
    assert "".join(token_texts(tokenizer, ids)) == decode(tokenizer, ids)


def test_ansi_colours_by_pass_and_counts() -> None:
    shown = render_ansi(["Hi", " the", "re", "."], [1, 2, 1], colour=True)
    body, legend = shown.split("\n")
    assert ESCAPE.sub("", body) == "Hi there."
    assert re.findall(r"48;5;(\d+)m", body)[0] != re.findall(r"48;5;(\d+)m", body)[1]
    assert body.count("\x1b[0m") == 3
    assert legend == "3 passes, 4 tokens, TPF 1.33 (one colour per pass)"


def test_a_background_never_runs_over_a_line_break() -> None:
    for line in render_ansi(["a\n", "\nb"], [2], colour=True).split("\n"):
        assert not ESCAPE.search(line) or line.endswith("\x1b[0m")


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b" in render_ansi(["a", "b"], [1, 1])
    monkeypatch.setenv("NO_COLOR", "")
    assert "\x1b" in render_ansi(["a", "b"], [1, 1])
    monkeypatch.setenv("NO_COLOR", "1")
    shown = render_ansi(["a", "b", "c"], [1, 2])
    assert "\x1b" not in shown
    assert shown.startswith("a|bc\n2 passes, 3 tokens, TPF 1.50")


def test_text_cannot_steer_the_terminal_or_the_page() -> None:
    hostile = "\x1b[2J\x07\x9b<script>&"
    shown = render_ansi([hostile], [1], colour=False)
    assert not any(char in shown for char in "\x1b\x07\x9b")
    page = render_html([hostile], [1], title="<b>")
    assert "<script>" not in page
    assert "&lt;script&gt;&amp;" in page
    assert "<title>&lt;b&gt;</title>" in page


def test_html_is_self_contained_and_names_the_passes() -> None:
    page = render_html(["你", "好", "!"], [1, 2])
    assert 'title="pass 1: 1 token">你</span>' in page
    assert 'title="pass 2: 2 tokens">好!</span>' in page
    assert "2 passes, 3 tokens, TPF 1.50" in page
    assert not re.search(r"(src|href)=|https?://", page)


def test_lengths_must_add_up() -> None:
    for render in (render_ansi, render_html):
        with pytest.raises(ValueError, match="2 tokens, but 3 texts"):
            render(["a", "b", "c"], [1, 1])


def test_nothing_decoded_is_no_division_by_zero() -> None:
    assert "0 passes, 0 tokens, TPF -" in render_ansi([], [], colour=False)
