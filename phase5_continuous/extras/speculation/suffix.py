"""Drafts from the outputs of earlier requests: a prompt that comes again often gets the same output again.

SuffixDecoding keeps a suffix tree of recent outputs, and follows the likeliest branch below the longest match. This is
a dictionary from the last few tokens to what last followed them. It is smaller, and all matches have one length.
"""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from phase0_request.request import Request
from phase5_continuous.extras.speculation.ngram import NgramProposer

FOLLOWING = 8  # tokens that are kept of what followed
KEPT = 1 << 15  # n-grams, and up to as many older ones: some 20 MB

Outputs = dict[tuple[str, tuple[int, ...]], list[int]]  # by salt and n-gram


class SuffixProposer(NgramProposer):
    """Drafts from the text of a request, or, if that has no match of full length, from earlier outputs.

    The time of an output reveals which drafts were right. So requests share outputs as they share prefixes: only within
    one `cache_salt`.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        super().__init__(shortest, longest)
        self._newer: Outputs = {}
        self._older: Outputs = {}
        self._noted: WeakKeyDictionary[Request, int] = WeakKeyDictionary()  # where in its text

    def propose(self, request: Request, most: int) -> Sequence[int]:
        draft, index = super().propose(request, most), self.index(request)
        self._note(request, index.tokens)
        if draft and index.matched in (0, self.longest):  # 0: it follows a prediction from the beginning
            return draft
        key = request.cache_salt, tuple(index.tokens[-self.longest :])
        found = self._newer.get(key) or self._older.get(key)
        return draft if found is None else found[:most]

    def _note(self, request: Request, tokens: Sequence[int]) -> None:
        """Note what followed each n-gram of the output, once enough has."""
        stop = len(tokens) - FOLLOWING + 1
        start = max(self.longest, self._noted.get(request, len(tokens) - len(request.output_tokens) + 1))
        for end in range(start, stop):
            key = request.cache_salt, tuple(tokens[end - self.longest : end])
            self._newer[key] = [*tokens[end : end + FOLLOWING]]
        self._noted[request] = max(start, stop)
        if len(self._newer) > KEPT:
            self._newer, self._older = {}, self._newer
