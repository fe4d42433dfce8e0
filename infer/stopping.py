"""Stop strings: where in the text of a completion one is complete, and what may already be shown.

A match counts wherever it lies: over several tokens, several passes, or the characters of one token. Of several, the
one that ends first wins, and of those that end together the one that starts first. So the answer depends on the text
alone, not on how it arrives.

Special tokens have no text here (they are left out of an answer), so no stop string matches one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache


class StopChecker:
    """Looks for stop strings in the text of one completion as it arrives; mutates only itself.

    Text that may turn out to be the start of a stop string is held back: the longest end of the text that is a proper
    prefix of one. A character costs constant time (on average over the text), whatever the stop strings.

    Args:
        strings: at least one, none of them empty.
        min_tokens: a stop string counts only if it is completed by a token after the first ``min_tokens``.
    """

    def __init__(self, strings: tuple[str, ...], min_tokens: int = 0) -> None:
        self._automaton = _automaton_of(strings)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._state = 0
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Take the text that one token adds (often nothing, see ``Detokenizer``).

        Returns:
            The text that is certain to belong to the answer and was not returned before; and whether the token
            completed a stop string: then this is all that lies before the string, and nothing may follow.
        """
        self._num_tokens += 1
        counts = self._num_tokens > self._min_tokens
        automaton, state = self._automaton, self._state
        num_before = len(self._held)
        text = self._held + text
        for index in range(num_before, len(text)):
            state = automaton.next_state(state, text[index])
            if counts and automaton.match_lengths[state]:
                self._held = ""
                return text[: index + 1 - automaton.match_lengths[state]], True
        self._state = state
        num_certain = len(text) - automaton.held_lengths[state]
        self._held = text[num_certain:]
        return text[:num_certain], False

    def finish(self) -> str:
        """Return what was held back: the completion ended, and no stop string can become complete any more."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """All prefixes of the stop strings as states (Aho and Corasick 1975, "Efficient string matching").

    State 0 is the empty prefix. After any text, the state is its longest end that is a prefix of a stop string.

    Attributes:
        match_lengths: by state, characters of the longest stop string that the state ends with; 0 for none.
        held_lengths: by state, characters of its longest end that is a proper prefix of a stop string.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._shorter = [0]  # by state: the state of its longest proper end
        self.match_lengths = [0]
        self.held_lengths = [0]
        for string in strings:
            self._add(string)
        self._link()

    def next_state(self, state: int, char: str) -> int:
        children = self._children
        while state and char not in children[state]:
            state = self._shorter[state]
        return children[state].get(char, 0)

    def _add(self, string: str) -> None:
        state = 0
        for char in string:
            if char not in self._children[state]:
                self._children[state][char] = len(self._children)
                self._children.append({})
                self._shorter.append(0)
                self.match_lengths.append(0)
                self.held_lengths.append(0)
            state = self._children[state][char]
        self.match_lengths[state] = len(string)

    def _link(self) -> None:
        """Fill in what depends on shorter states, the shortest first."""
        pending = deque((state, char, 0, 1) for char, state in self._children[0].items())
        while pending:
            state, char, parent, depth = pending.popleft()
            if parent:
                self._shorter[state] = self.next_state(self._shorter[parent], char)
            shorter = self._shorter[state]
            self.match_lengths[state] = self.match_lengths[state] or self.match_lengths[shorter]
            self.held_lengths[state] = depth if self._children[state] else self.held_lengths[shorter]
            pending.extend((child, char, state, depth + 1) for char, child in self._children[state].items())


# A server sees the same few stop strings with most requests.
@lru_cache(maxsize=16)
def _automaton_of(strings: tuple[str, ...]) -> _Automaton:
    return _Automaton(strings)
