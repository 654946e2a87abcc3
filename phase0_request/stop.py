"""StopScanner: find a stop string in text that arrives in pieces, and never show what may turn out to be its start."""

from collections.abc import Iterable


def _borders(stop: str) -> list[int]:
    """borders[i]: how long the longest proper prefix of stop[:i+1] is that is its suffix too (Knuth-Morris-Pratt)."""
    borders = [0] * len(stop)
    matched = 0
    for i in range(1, len(stop)):
        while matched and stop[i] != stop[matched]:
            matched = borders[matched - 1]
        if stop[i] == stop[matched]:
            matched += 1
        borders[i] = matched
    return borders


class StopScanner:
    """Text goes in by any pieces; text that is safe to show comes out; `matched` is the stop string that ended it.

    Each stop string remembers how much of itself the text so far ends with. The longest of these is held back: it may
    be the start of a stop. The rest can never become part of one. The first stop to complete wins, the longest if
    several complete on one character, so the answer does not depend on how the text was cut.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._progress = [0] * len(self._stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """More text. Returns what has become safe to show: nothing, once a stop string has been found."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        # region exercise 0.6
        start = len(self._held)
        text = self._held + text
        for end in range(start, len(text)):
            for i, (stop, borders) in enumerate(self._stops):
                length = self._progress[i]
                while length and stop[length] != text[end]:
                    length = borders[length - 1]
                if stop[length] == text[end]:
                    length += 1
                self._progress[i] = length
                if length == len(stop) and (self.matched is None or length > len(self.matched)):
                    self.matched = stop
            if self.matched is not None:
                self._held = ""
                return text[: end + 1 - len(self.matched)]
        safe = len(text) - max(self._progress)
        self._held = text[safe:]
        return text[:safe]
        # endregion

    def held(self) -> str:
        """What is held back: if no more text will come, it is not a stop string after all."""
        return self._held
