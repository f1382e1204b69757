"""Searching a text for stop strings while it is written.

Each character costs a step for every stop string that the end of the text begins, however long they are: strings that
nearly match do not make a token slow. The search is Knuth, Morris and Pratt's; what it needs to know of a string is
worked out as far as the text has come in it.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopSearch:
    """How much of each stop string the end of the text is. It keeps no text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._at = 0  # characters so far
        self._stops = [_Stop(stop) for stop in stops]
        self._first: dict[str, list[int]] = {}  # stops by their first character
        for i, stop in enumerate(stops):
            self._first.setdefault(stop[0], []).append(i)
        self._begun: dict[int, int] = {}  # stop → how many of its characters are there, if any

    @property
    def longest(self) -> int:
        """How many characters at the end of the text may become a stop string."""
        return max(self._begun.values(), default=0)

    def push(self, text: str) -> tuple[int, str] | None:
        """More text. Returns where the first stop string in it begins, and which; the first given, of several."""
        starts: dict[int, int] = {}
        for at, character in enumerate(text if self._stops else "", self._at + 1):
            for i in self._step(character):
                starts.setdefault(i, at - len(self._stops[i].text))
        self._at += len(text)
        first = min(starts, key=lambda i: (starts[i], i), default=None)
        return None if first is None else (starts[first], self._stops[first].text)

    def _step(self, character: str) -> list[int]:
        """One more character; the stops that end with it."""
        if not self._begun and character not in self._first:
            return []
        begun = dict.fromkeys(self._first.get(character, ()), 1)
        for i, count in self._begun.items():
            if (count := self._stops[i].after(count, character)) > 0:
                begun[i] = count
        self._begun = begun
        ended = [i for i, count in begun.items() if count == len(self._stops[i].text)]
        for i in ended:
            del begun[i]
        return ended

    def again(self) -> StopSearch:
        """A search that begins here: no stop string spans this place."""
        twin = self.copy()
        twin._begun = {}
        return twin

    def copy(self) -> StopSearch:
        """An independent copy. What is known of the stop strings is shared: it only grows."""
        twin = object.__new__(StopSearch)
        twin.__dict__.update(self.__dict__)
        twin._begun = dict(self._begun)
        return twin


class _Stop:
    """A stop string, and for each length of its beginning where to go on when the next character does not fit."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._shorter = [-1]  # by length: the longest beginning that this one ends with, and that goes on differently
        self._border = -1  # the longest beginning that the last of them ends with, however it goes on

    def after(self, count: int, character: str) -> int:
        """How much of it the text's end is, when `count` characters were there and this one follows."""
        if len(self._shorter) <= count:
            self._learn(count)
        while count >= 0 and self.text[count] != character:
            count = self._shorter[count]
        return count + 1

    def _learn(self, count: int) -> None:
        """One more length: the text grows by a character at a time, and so does what is known."""
        assert len(self._shorter) == count
        text, border = self.text, self._border
        while border >= 0 and text[border] != text[count - 1]:
            border = self._shorter[border]
        border = self._border = border + 1
        self._shorter.append(border if text[border] != text[count] else self._shorter[border])
