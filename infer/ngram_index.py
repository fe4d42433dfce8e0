"""Where the last few tokens stood before, and what followed them there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

LONGEST = 3
LONGEST_RUN = 10
MOST_REJECTED = 2048
END = -1
_DECAY = 0.97
_OTHERS_WEIGHT = 4.0
_TRY_OTHER_EVERY = 16
# Accepted per pass where nothing has been counted: carried guesses, copies.
_PRIOR = (0.5, 1.0)
# Token ids are packed into one integer key; an id beyond 2^20 would at worst give a wrong guess.
_BITS = 20
_MASKS = tuple((1 << _BITS * num_tokens) - 1 for num_tokens in range(1, LONGEST + 1))
_MASK_1, _MASK_2, _MASK_3 = _MASKS


class NgramIndex:
    """A text and, for every run of 1 to ``LONGEST`` tokens in it, the place where its latest continuation begins.

    Appending and looking up take constant time. Mutates only itself.

    Attributes:
        tokens: the text, token ids.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._follows: tuple[dict[int, int], ...] = tuple({} for _ in range(LONGEST))
        self._run = 0

    def append(self, token_ids: Iterable[int]) -> None:
        """Add tokens to the end of the text."""
        one, two, three = self._follows
        tokens, run = self.tokens, self._run
        position = len(tokens)
        last = key_of(tokens[max(position - run, position - LONGEST, 0) :]) if run else 0
        for token in token_ids:
            if run:
                one[last & _MASK_1] = position
                if run > 1:
                    two[last & _MASK_2] = position
                    if run > 2:
                        three[last] = position
            last = (last << _BITS | token) & _MASK_3
            tokens.append(token)
            run += 1
            position += 1
        self._run = run

    def knows_two(self, key: int) -> bool:
        """Whether anything has followed the last two tokens of a text here."""
        return key & _MASK_2 in self._follows[1]

    def end_run(self) -> None:
        """No run of tokens goes over this place: what comes next belongs to another text."""
        self.tokens.append(END)
        self._run = 0

    def find(self, key: int, num_tokens: int) -> int | None:
        """Place of the latest continuation of a run of tokens; None when it has none.

        Args:
            key: :func:`key_of` a text that ends with the run.
            num_tokens: length of the run, 1 to ``LONGEST``.
        """
        return self._follows[num_tokens - 1].get(key & _MASKS[num_tokens - 1])


def key_of(token_ids: Sequence[int]) -> int:
    """Key of a text's last ``LONGEST`` tokens, or of all of them if they are fewer."""
    key = 0
    for token in token_ids[-LONGEST:]:
        key = key << _BITS | token
    return key


class Contest:
    """Guesses accepted per pass with copied guesses and with carried ones, by the length of the run that was copied."""

    def __init__(self) -> None:
        self._num_passes = [[0.0, 0.0] for _ in range(LONGEST + 1)]
        self._num_accepted = [[0.0, 0.0] for _ in range(LONGEST + 1)]
        self._num_choices = 0

    def add(self, choice: tuple[int, bool], num_accepted: int) -> None:
        """Count a pass: length of the run, whether carried guesses had been dropped for the copy."""
        length, drops = choice
        self._num_passes[length][drops] = _DECAY * self._num_passes[length][drops] + 1
        self._num_accepted[length][drops] = _DECAY * self._num_accepted[length][drops] + num_accepted

    def drops(self, length: int, others: Contest) -> bool:
        """Whether to drop carried guesses for a copy; ``others`` has counted all requests."""
        self._num_choices += 1
        is_better = self._mean(length, True, others) >= self._mean(length, False, others)
        return is_better != (self._num_choices % _TRY_OTHER_EVERY == 0)

    def _mean(self, length: int, drops: bool, others: Contest) -> float:
        prior = (others._num_accepted[length][drops] + _PRIOR[drops]) / (others._num_passes[length][drops] + 1)
        own = self._num_accepted[length][drops] + _OTHERS_WEIGHT * prior
        return own / (self._num_passes[length][drops] + _OTHERS_WEIGHT)


class NgramMemory:
    """What one request can copy guesses from: its text (prompt and committed tokens), and guesses once rejected.

    The text grows with the request, by about a hundredth of what its K/V take. Of the rejected runs at most
    ``MOST_REJECTED`` tokens are kept; then all are forgotten and new ones gather.

    Attributes:
        text: prompt and committed tokens, as far as :meth:`catch_up` has read them.
        rejected: runs of predictions that were not proved, one after the other.
        contest: whether copies or carried guesses have been better in this request.
        choice: what the pass to come tries for it: length of the known run, whether carried guesses were dropped.
    """

    def __init__(self) -> None:
        self.text = NgramIndex()
        self.rejected = NgramIndex()
        self.contest = Contest()
        self.choice: tuple[int, bool] | None = None

    def catch_up(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> None:
        """Read what was committed since the last time."""
        known, prompt_len = len(self.text.tokens), len(prompt_ids)
        if known < prompt_len:
            self.text.append(prompt_ids[known:])
            known = prompt_len
        if known < prompt_len + len(completion_ids):
            self.text.append(completion_ids[known - prompt_len :])

    def add_rejected(self, last_token_id: int, token_ids: Sequence[int]) -> None:
        """Keep a run of guesses that followed a committed token; only its first tokens, since the others are noise."""
        if len(self.rejected.tokens) > MOST_REJECTED - LONGEST_RUN:
            self.rejected = NgramIndex()
        self.rejected.append((last_token_id, *token_ids[: LONGEST_RUN - 2]))
        self.rejected.end_run()

    def longest_match(self, key: int) -> int:
        """Length of the longest run at the end of the text that the text has had before, 0 to ``LONGEST``."""
        return next((length for length in range(LONGEST, 0, -1) if self.text.find(key, length) is not None), 0)

    def find(self, key: int, num_known: int) -> tuple[list[int], int] | None:
        """Latest continuation of the longest known run that ends a text, committed text before rejected guesses.

        Args:
            key: :func:`key_of` the text.
            num_known: tokens of the text, at least 1.

        Returns:
            The tokens it stands in, and its place there; None when even the last token is new.
        """
        for num_tokens in range(min(num_known, LONGEST), 0, -1):
            for index in (self.text, self.rejected):
                place = index.find(key, num_tokens)
                if place is not None:
                    return index.tokens, place
        return None
