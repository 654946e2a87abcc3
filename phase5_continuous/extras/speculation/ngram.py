"""Prompt lookup: when the last few tokens have occurred before, draft what followed them then.

Outputs repeat their prompt and themselves: code that is edited, a document that is summarised, names, tables. OpenAI's
`prediction`, the output that a request expects, is one more text to look in.
"""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from phase0_request.request import Request
from phase0_request.support.checks import check_int

END = -1  # of a prediction, before the prompt
CANDIDATES = 16  # earlier occurrences that are compared, so that a draft takes microseconds however long the text is


class NgramIndex:
    """A text, and where each of its n-grams ends.

    All ends of one n-gram are chained, the latest first, as gzip finds repetitions: a token costs one look-up and one
    link, a match as many comparisons as it has candidates.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self.shortest = shortest
        self.longest = longest
        self.tokens: list[int] = []
        self.start = 0  # of the output
        self.matched = 0  # tokens of the match that the latest continuation follows
        self._latest: dict[tuple[int, ...], int] = {}  # of each n-gram of the shortest length, where it ends
        self._previous: list[int] = []  # for each end, the one before it of the same n-gram; 0: there is none

    # region exercise 11.2
    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self.tokens.append(token)
            ngram = tuple(self.tokens[-self.shortest :])
            self._previous.append(self._latest.get(ngram, 0))
            self._latest[ngram] = len(self.tokens)

    def continuation(self, most: int) -> list[int]:
        """Up to `most` tokens that followed an earlier occurrence of the last tokens: the longest match up to
        `longest` tokens, and of equal ones the latest. A text that repeats with a period is continued beyond its
        end."""
        tokens, best, longest = self.tokens, 0, 0
        candidate = self._previous[-1] if self._previous else 0
        for _ in range(CANDIDATES):
            if candidate < self.shortest or longest == self.longest:
                break
            length = self.shortest
            while length < min(self.longest, candidate) and tokens[candidate - 1 - length] == tokens[-1 - length]:
                length += 1
            if length > longest:
                best, longest = candidate, length
            candidate = self._previous[candidate - 1]
        self.matched = longest
        if not longest:
            return []
        draft = tokens[best : best + most]
        period = len(tokens) - best
        while len(draft) < most:
            draft.append(draft[len(draft) - period])
        return draft

    # endregion


class NgramProposer:
    """Drafts for each request from its prompt and output, and from its `prediction`."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.shortest = check_int("prompt_lookup_min", shortest, 1)
        self.longest = check_int("prompt_lookup_max", longest, shortest)
        self._indexes: WeakKeyDictionary[Request, NgramIndex] = WeakKeyDictionary()

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Up to `most` tokens that may follow the request's."""
        prediction, done = request.params.prediction, len(request.output_tokens)
        if done < self.longest and [*prediction[:done]] == request.output_tokens:  # too short to be found
            return prediction[done : done + most]
        draft = self.index(request).continuation(most)
        return draft[: draft.index(END)] if END in draft else draft

    def index(self, request: Request) -> NgramIndex:
        """The text of a request: what is predicted, its prompt, and its output so far."""
        index = self._indexes.get(request)
        if index is None:
            index = self._indexes[request] = NgramIndex(self.shortest, self.longest)
            index.extend([*request.params.prediction, END, *request.prompt_tokens])
            index.start = len(index.tokens)
        index.extend(request.output_tokens[len(index.tokens) - index.start :])
        return index
