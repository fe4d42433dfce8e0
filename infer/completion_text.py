"""The text of a completion while its tokens are committed."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from jacobi_llm.infer.detokenizer import Detokenizer
from jacobi_llm.infer.stopping import StopChecker


class CompletionText:
    """Text of one request, cut before the stop string or stop token that ended it; mutates only itself.

    Text becomes visible when it is certain: never half a character, and nothing that a stop string may still take.

    Args:
        tokenizer: that of the model.
        stop: stop strings.
        min_tokens: see :class:`StopChecker`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...] = (), min_tokens: int = 0) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._checker = StopChecker(stop, min_tokens) if stop else None
        self._pieces: list[str] = []
        self._num_popped = 0
        self._is_complete = False

    def stop_at(self, token_ids: Sequence[int]) -> int | None:
        """Take the tokens that are committed next, without a stop token at their end (it has no text).

        Returns:
            How many of them are kept when one completes a stop string, that one included; None when none does. What
            lies behind it was not taken.
        """
        if self._checker is None:
            self._pieces.append(self._detokenizer.push(token_ids))
            return None
        for number, token_id in enumerate(token_ids, start=1):
            text, self._is_complete = self._checker.push(self._detokenizer.push((token_id,)))
            self._pieces.append(text)
            if self._is_complete:
                return number
        return None

    def finish(self) -> None:
        """The completion has ended: make visible what was held back, unless a stop string ended it."""
        if self._is_complete:
            return
        self._is_complete = True
        if self._checker is not None:
            self._pieces.append(self._checker.finish())
        self._pieces.append(self._detokenizer.finish())

    def pop(self) -> str:
        """Return what became visible since the last call."""
        text = "".join(self._pieces[self._num_popped :])
        self._num_popped = len(self._pieces)
        return text

    @property
    def text(self) -> str:
        """All that is visible."""
        return "".join(self._pieces)
