"""Token ids in, text out, piece by piece: a character that spans several tokens appears with its last one.

    detokenizer = Detokenizer(tokenizer)
    text = detokenizer.push([12, 7]) + detokenizer.push([9]) + detokenizer.finish()

Joined, the pieces are the text of all tokens decoded at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# The start of a character, at most 3 bytes of 4, decodes to at most so many replacement characters.
_MAX_HALF = 3


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
    """The text of one request as its tokens arrive; mutates only itself."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, keep_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._keep_special = keep_special
        self._token_ids: list[int] = []
        # Only tokens from _context on are decoded again. Those before _cut are left context: some tokenizers treat the
        # first token of a text in a way of its own. _num_given counts the characters of that text that were returned.
        self._context = 0
        self._cut = 0
        self._num_given = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Take tokens; return the text that became certain, never half a character."""
        pieces = []
        for token_id in token_ids:
            self._token_ids.append(token_id)
            pieces.append(self._advance(is_last=False))
        return "".join(pieces)

    def finish(self) -> str:
        """Return what was held back, with replacement characters where bytes are missing for good."""
        return self._advance(is_last=True)

    def _advance(self, *, is_last: bool) -> str:
        text = self._decode()
        num_half = 0 if is_last else min(len(text) - len(text.rstrip(_REPLACEMENT)), _MAX_HALF)
        piece = text[self._num_given : len(text) - num_half]
        self._num_given += len(piece)
        if piece and not num_half:
            self._context, self._cut = self._cut, len(self._token_ids)
            self._num_given = len(self._decode())
        return piece

    def _decode(self) -> str:
        return decode(self._tokenizer, self._token_ids[self._context :], keep_special=self._keep_special)
