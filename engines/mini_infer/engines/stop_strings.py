"""Finds stop strings in text that comes in pieces of any cut. Knows neither tokens nor tokenizers."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """Lets text through up to the first stop string, holding back only what may yet become one.

    First is what ends first, and of two that end together the longer one, so that the answer does not depend on how
    the text was cut into pieces. ``include``: whether the stop string itself is let through.
    An Aho-Corasick automaton (Aho & Corasick 1975): each character costs amortized constant time, however long and
    self-similar the strings are; its depth is the length of the text to hold back.
    """

    def __init__(self, strings: Sequence[str], *, include: bool = False) -> None:
        if not strings or not all(strings):
            raise ValueError("stop strings must not be empty")
        self.matched: str | None = None
        self._include = include
        self._held = ""
        self._state = 0
        self._first_letters = re.compile("[" + re.escape("".join({text[0] for text in strings})) + "]")
        # Per state: next states by character, length of its text, state of its longest proper suffix, and the longest
        # stop string that its text ends with.
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._suffix = [0]
        self._stop: list[str | None] = [None]
        for text in strings:
            self._add(text)
        self._link()

    def _add(self, text: str) -> None:
        state = 0
        for letter in text:
            if letter not in self._next[state]:
                self._next[state][letter] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._suffix.append(0)
                self._stop.append(None)
            state = self._next[state][letter]
        self._stop[state] = text

    def _link(self) -> None:
        """Goes through the states by depth, so that a state's suffix is ready before it."""
        todo = deque(self._next[0].values())
        while todo:
            state = todo.popleft()
            for letter, child in self._next[state].items():
                self._suffix[child] = self._step(self._suffix[state], letter)
                todo.append(child)
            self._stop[state] = self._stop[state] or self._stop[self._suffix[state]]

    def _step(self, state: int, letter: str) -> int:
        while state and letter not in self._next[state]:
            state = self._suffix[state]
        return self._next[state].get(letter, 0)

    def feed(self, text: str, *, counts: bool = True) -> str:
        """Takes more text, gives what is certain not to be cut, and sets `matched` where a stop string ends.

        ``counts``: whether a stop string may end in this piece; one that does not count is let through. After a match
        all text is dropped.
        """
        if self.matched is not None:
            return ""
        if not self._state and not self._first_letters.search(text):
            return text
        state = self._state
        for index, letter in enumerate(text):
            state = self._step(state, letter)
            if self._stop[state] is None:
                continue
            if counts:
                return self._cut(self._held + text[: index + 1], state)
            while not self._next[state]:  # nothing longer can come of it, so it is not held back
                state = self._suffix[state]
        self._state = state
        return self._hold(self._held + text, self._depth[state])

    def _cut(self, text: str, state: int) -> str:
        self.matched = self._stop[state]
        assert self.matched is not None
        self._held, self._state = "", 0
        return text if self._include else text.removesuffix(self.matched)

    def _hold(self, text: str, num_held: int) -> str:
        num_certain = len(text) - num_held
        self._held = text[num_certain:]
        return text[:num_certain]

    def flush(self) -> str:
        """The text held back, when no more comes."""
        held, self._held, self._state = self._held, "", 0
        return held
