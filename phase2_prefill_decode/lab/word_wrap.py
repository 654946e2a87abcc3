"""WordWrap: breaks the lines of a text between words while it is streamed."""

from rich.cells import cell_len


class WordWrap:
    """Holds a word back until it is complete, and begins a line with it if it does not fit. A wide character, as in
    Chinese, is a word."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._column = 0
        self._space = self._word = ""

    def push(self, text: str) -> str:
        """What can be printed now."""
        return "".join(map(self._next, text))

    def _next(self, character: str) -> str:
        if not character.isspace():
            self._word += character
            return self.end() if cell_len(character) > 1 else ""
        words = self.end()
        if character != "\n":
            self._space += character
            return words
        self._column, self._space = 0, ""
        return words + character

    def end(self) -> str:
        """The word that is held back."""
        if not self._word:
            return ""
        text, self._space, word, self._word = self._space + self._word, "", self._word, ""
        self._column += cell_len(text)
        if self._column <= self._width:
            return text
        self._column = cell_len(word)
        return f"\n{word}"
