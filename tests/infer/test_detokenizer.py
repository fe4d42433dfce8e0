"""Detokenising piece by piece: whole characters only, the text of the whole, in linear time."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from jacobi_llm.infer import detokenizer as detokenizer_module
from jacobi_llm.infer.detokenizer import Detokenizer, decode, token_texts
from jacobi_llm.infer.models import load_tokenizer
from tests.tiny_models import tiny_tokenizer

BYTE_TOKENIZER = tiny_tokenizer()
NUM_WORDS = 4


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer in SentencePiece's manner: a space before each word, single bytes for what has no token."""
    words = ["<s>", "\u2581Hello", "\u2581world", "!", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


class OwnDecoding(PreTrainedTokenizerFast):
    """Decodes in a way of its own, so that its tokens must not be taken for bytes."""

    def _decode(self, *args: Any, **kwargs: Any) -> str:
        return super()._decode(*args, **kwargs).upper()


@pytest.fixture(params=["bytes", "decoding"])
def road(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test on both ways of making text from the tokens of a byte-level tokenizer."""
    if request.param == "decoding":
        monkeypatch.setattr(detokenizer_module, "_is_byte_level", lambda tokenizer: False)
    return str(request.param)


def ids_of(text: str) -> list[int]:
    return list(BYTE_TOKENIZER(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("is_byte_level", [True, False])
@given(text=st.text(max_size=40), step=st.integers(1, 5))
def test_pieces_join_to_the_text_and_never_show_half_a_character(is_byte_level: bool, text: str, step: int) -> None:
    with mock.patch.object(detokenizer_module, "_is_byte_level", return_value=is_byte_level):
        detokenizer = Detokenizer(BYTE_TOKENIZER)
    ids = ids_of(text)
    pieces = [detokenizer.push(ids[start : start + step]) for start in range(0, len(ids), step)]
    assert "".join(pieces) + detokenizer.finish() == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("is_byte_level", [True, False])
@pytest.mark.parametrize("keep_special", [True, False])
@given(ids=st.lists(st.integers(0, 258), max_size=40))
def test_any_bytes_give_the_text_of_the_whole(is_byte_level: bool, keep_special: bool, ids: list[int]) -> None:
    with mock.patch.object(detokenizer_module, "_is_byte_level", return_value=is_byte_level):
        texts = token_texts(BYTE_TOKENIZER, ids, keep_special=keep_special)
    assert "".join(texts) == decode(BYTE_TOKENIZER, ids, keep_special=keep_special)


def test_text_goes_on_after_broken_bytes(road: str) -> None:
    broken = ids_of("é")[:1]
    detokenizer = Detokenizer(BYTE_TOKENIZER)
    assert detokenizer.push(broken) == ""
    assert detokenizer.push(ids_of("a")) == "\ufffda"
    assert detokenizer.push(ids_of("b")) == "b"


def test_a_cut_character_appears_at_the_end(road: str) -> None:
    detokenizer = Detokenizer(BYTE_TOKENIZER)
    assert detokenizer.push(ids_of("ab😀")[:-1]) == "ab"
    assert detokenizer.finish() == "\ufffd"


def test_special_tokens_are_left_out_unless_asked_for(road: str) -> None:
    ids = [*ids_of("ok"), 2]
    assert decode(BYTE_TOKENIZER, ids) == "ok"
    assert token_texts(BYTE_TOKENIZER, ids) == ["o", "k", ""]
    assert token_texts(BYTE_TOKENIZER, ids, keep_special=True) == ["o", "k", "<|im_end|>"]


def test_added_tokens_are_spelled_out(road: str) -> None:
    """Their text is no spelling of bytes: a space, or a character outside the alphabet, stands for itself."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<a b>", "日本"])
    ids = [*ids_of("x"), len(tokenizer) - 2, len(tokenizer) - 1, len(tokenizer) + 5]
    assert "".join(token_texts(tokenizer, ids)) == decode(tokenizer, ids) == "x<a b>日本"


def test_spaces_between_words_survive_a_tokenizer_that_strips_the_first() -> None:
    tokenizer: PreTrainedTokenizerBase = byte_fallback_tokenizer()
    ids = [1, 2, 3, 2, *(NUM_WORDS + byte for byte in "é".encode()), 1]
    assert token_texts(tokenizer, ids) == ["Hello", " world", "!", " world", "", "é", " Hello"]
    assert "".join(token_texts(tokenizer, ids)) == decode(tokenizer, ids)


@given(words=st.lists(st.sampled_from([[0], [1], [2], [3], *([NUM_WORDS + b for b in c.encode()] for c in "é你😀")])))
def test_byte_fallback_gives_the_text_of_the_whole(words: list[list[int]]) -> None:
    tokenizer = byte_fallback_tokenizer()
    ids = [id for word in words for id in word]
    texts = token_texts(tokenizer, ids)
    assert "".join(texts) == decode(tokenizer, ids)
    assert not any("\ufffd" in text for text in texts)


def test_a_tokenizer_that_decodes_in_its_own_way_is_asked() -> None:
    tokenizer = OwnDecoding(tokenizer_object=BYTE_TOKENIZER.backend_tokenizer)
    assert "".join(token_texts(tokenizer, ids_of("naïve"))) == "NAÏVE"


@pytest.mark.parametrize("ids", [[0] * 2000, ids_of("é")[:1] * 2000, [*ids_of("a"), *[2] * 2000]])
def test_tokens_without_text_are_not_decoded_again_and_again(
    ids: list[int], road: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """End-of-sequence tokens in a row (``ignore_eos``), or half characters in a row."""
    num_decoded = 0

    def counted(tokenizer: Any, token_ids: list[int], **kwargs: Any) -> str:
        nonlocal num_decoded
        num_decoded += len(token_ids)
        return decode(tokenizer, token_ids, **kwargs)

    monkeypatch.setattr(detokenizer_module, "decode", counted)
    text = "".join(token_texts(BYTE_TOKENIZER, [*ids, *ids_of("b")]))
    assert text == decode(BYTE_TOKENIZER, [*ids, *ids_of("b")])
    assert num_decoded < 100 * len(ids)


@pytest.mark.slow
def test_every_token_of_the_real_vocabulary() -> None:
    tokenizer = load_tokenizer("smollm2-135m")
    for keep_special in (False, True):
        for token_id in range(len(tokenizer)):
            piece = token_texts(tokenizer, [token_id], keep_special=keep_special)
            assert piece == [decode(tokenizer, [token_id], keep_special=keep_special)]
