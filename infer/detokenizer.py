"""Token ids in, text out, piece by piece: a character that spans several tokens appears with its last one.

    detokenizer = Detokenizer(tokenizer)
    text = detokenizer.push([12, 7]) + detokenizer.push([9]) + detokenizer.finish()

Joined, the pieces are the text of all tokens decoded at once. (One exception: a tokenizer with byte fallback turns a
whole run of byte tokens into replacement characters when one of them is wrong. Characters of the run that were right,
and given out before, stay.)
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import lru_cache

from tokenizers import decoders
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# The start of a character, at most 3 bytes of 4, decodes to at most so many replacement characters.
_MAX_HALF = 3
# So many tokens in a row without one whole character at the end are no text; they are not looked at again.
_MAX_TAIL = 32


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
    """Return the text of ``token_ids``, white space untouched, without special tokens unless asked for."""
    text = tokenizer.decode(list(token_ids), skip_special_tokens=not keep_special, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def token_texts(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], *, keep_special: bool = False
) -> list[str]:
    """Return the text that each token adds; joined, they are the text of the whole.

    A token that ends in the middle of a character adds what is complete, often nothing.
    """
    detokenizer = Detokenizer(tokenizer, keep_special=keep_special)
    texts = [detokenizer.push([token_id]) for token_id in token_ids]
    if texts:
        texts[-1] += detokenizer.finish()
    return texts


class Detokenizer:
    """The text of one request as its tokens arrive; mutates only itself. The time is linear in the tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, keep_special: bool = False) -> None:
        self._text: _TextFromBytes | _TextFromDecoding
        if _is_byte_level(tokenizer):
            self._text = _TextFromBytes(_token_bytes(tokenizer, keep_special))
        else:
            self._text = _TextFromDecoding(tokenizer, keep_special)

    def push(self, token_ids: Sequence[int]) -> str:
        """Take tokens; return the text that became certain, never half a character."""
        return self._text.push(token_ids)

    def finish(self) -> str:
        """Return what was held back, with replacement characters where bytes are missing for good."""
        return self._text.finish()


class _TextFromBytes:
    """For byte-level tokenizers, in which every token stands for the same bytes wherever it occurs."""

    def __init__(self, token_bytes: _TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join([self._token_bytes[token_id] for token_id in token_ids]))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _TextFromDecoding:
    """For all other tokenizers: the last tokens are decoded again with each new one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, keep_special: bool) -> None:
        self._tokenizer = tokenizer
        self._keep_special = keep_special
        self._left_out = frozenset() if keep_special else _special_ids(tokenizer)
        self._token_ids: list[int] = []
        # Only tokens from _context on are decoded again. Those before _cut are left context: some tokenizers treat the
        # first token of a text in a way of its own. _num_given counts the characters of that text that were returned.
        self._context = 0
        self._cut = 0
        self._num_given = 0

    def push(self, token_ids: Sequence[int]) -> str:
        pieces = []
        for token_id in token_ids:
            if token_id not in self._left_out:
                self._token_ids.append(token_id)
                pieces.append(self._advance(is_last=False))
        return "".join(pieces)

    def finish(self) -> str:
        return self._advance(is_last=True)

    def _advance(self, *, is_last: bool) -> str:
        text = self._decode()
        num_wrong = len(text) - len(text.rstrip(_REPLACEMENT))
        if is_last or not num_wrong:
            piece = text[self._num_given :]
            if piece:
                self._context, self._cut = self._cut, len(self._token_ids)
                self._num_given = len(self._decode())
            return piece
        # With byte fallback, half a character makes those before it look wrong as well: wait for its end.
        if len(self._token_ids) - self._cut <= _MAX_TAIL:
            return ""
        num_half = min(num_wrong, _MAX_HALF)
        piece = text[self._num_given : len(text) - num_half]
        self._context, self._cut = self._cut, len(self._token_ids) - _MAX_HALF
        self._num_given = len(self._decode()) - num_half
        return piece

    def _decode(self) -> str:
        return decode(self._tokenizer, self._token_ids[self._context :], keep_special=self._keep_special)


class _TokenBytes(dict[int, bytes]):
    """Bytes of each token id of a byte-level tokenizer, filled in as they are asked for."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, left_out: frozenset[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._left_out = left_out

    def __missing__(self, token_id: int) -> bytes:
        # The head of a model may have more rows than the tokenizer has tokens; such an id has no text.
        token = None if token_id in self._left_out else self._tokenizer.convert_ids_to_tokens(token_id)
        found = b""
        if isinstance(token, str):
            # An added token is spelled out as it is read, and may hold what is no spelling of a byte.
            is_spelled = all(char in _BYTE_OF_CHAR for char in token)
            found = bytes(_BYTE_OF_CHAR[char] for char in token) if is_spelled else token.encode()
        self[token_id] = found
        return found


def _bytes_of_chars() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for (inverse of GPT-2's ``bytes_to_unicode``)."""
    as_they_are = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in as_they_are]
    return {chr(byte): byte for byte in as_they_are} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHAR = _bytes_of_chars()


def _is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the text of tokens is their bytes, one after the other; not when a subclass decodes in its own way."""
    return (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and type(tokenizer).decode is PreTrainedTokenizerFast.decode
        and type(tokenizer)._decode is PreTrainedTokenizerFast._decode
        and isinstance(tokenizer.backend_tokenizer.decoder, decoders.ByteLevel)
    )


@lru_cache(maxsize=4)
def _token_bytes(tokenizer: PreTrainedTokenizerBase, keep_special: bool) -> _TokenBytes:
    return _TokenBytes(tokenizer, frozenset() if keep_special else _special_ids(tokenizer))


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that ``skip_special_tokens`` leaves out; empty when the tokenizer does not name them."""
    try:
        return frozenset(id for id, token in tokenizer.added_tokens_decoder.items() if token.special)
    except NotImplementedError:
        return frozenset()
