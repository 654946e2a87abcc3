"""A draft model: a smaller model with the same vocabulary computes the next tokens, one after the other.

Both models draw a token with the noise of its request's seed and position. Where they agree on the probabilities, they
draw the same token, at any temperature.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from phase0_request.batch import Batch, Slice
from phase0_request.core import Runner
from phase0_request.request import Request, RequestState
from phase1_kv_pool.cache import PagedCache

CATCH_UP = 256  # tokens that a step computes, at most, before the first drafts


class DraftModel:
    """Drafts with a runner and a KV cache of its own.

    A request that finds no room in this cache gets no drafts. A request that ends or is preempted loses its pages here
    when the next drafts are made. Tokens that the draft model has not computed, such as a prompt, are computed before
    the first draft, in chunks.
    """

    runner: Runner[Any]
    cache: PagedCache
    cost: float  # the time of its steps, as a share of the target model's
    context: int  # tokens of its longest request

    def __init__(self, model: str) -> None:
        """A model by its directory; `draft_loading` loads and connects it."""
        self.model = model
        self.computed: dict[Request, int] = {}  # tokens of each request that has pages
        self.drafts: dict[Request, list[int]] = {}  # what it drafted after them; all but the last token is computed

    def connect(self, runner: Runner[Any], cache: PagedCache, cost: float, context: int) -> None:
        self.runner, self.cache, self.cost, self.context = runner, cache, cost, context

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Up to `most` tokens of the draft that was made for this step, if one was."""
        return self.drafts[request][:most] if self.computed.get(request) == request.total else ()

    def reset(self) -> None:
        """Forget all that is computed: a step has failed."""
        for request in [*self.computed]:
            self._release(request)

    # region exercise 11.3
    def draft(self, wanted: Mapping[Request, int]) -> None:
        """Draft this many tokens for each request. A step computes one token of all requests together."""
        for request in [request for request in self.computed if request.state is not RequestState.RUNNING]:
            self._release(request)
        slices, left = list[Slice](), CATCH_UP
        for request, most in wanted.items():
            start = self._allocate(request, request.total + most - 1)
            length = 0 if start is None else min(request.total - start, left)
            if start is not None and length:
                slices.append(Slice(request, start, length))
                left -= length
        drafts: dict[Request, list[int]] = {request: [] for request in wanted}
        while slices:
            output, following = self.runner.launch(self.runner.pack(Batch(tuple(slices)))).output(), list[Slice]()
            for part, token in zip(slices, output.tokens, strict=True):
                request, draft = part.request, drafts[part.request]
                self.computed[request] = min(part.stop, request.total)
                if token is not None:
                    draft.append(token)
                    if len(draft) < wanted[request]:
                        following.append(Slice(request, part.stop, 1, tuple(draft)))
            slices = following
        for request in self.computed.keys() & wanted.keys():
            self.drafts[request] = drafts[request]
            if drafts[request]:
                self.cache.publish(request)

    # endregion

    # region exercise 11.4
    def _allocate(self, request: Request, tokens: int) -> int | None:
        """Make room for this many tokens of a request. Returns how many are computed, with the tokens of the last draft
        that turned out right; None if there is no room."""
        if request not in self.computed:
            self.computed[request], self.drafts[request] = self.cache.attach(request), []
        if tokens > self.context or not self.cache.can_grow(request, tokens):
            self._release(request)
            return None
        self.cache.grow(request, tokens)
        last = request.total - 1  # its logits yield the first draft, so it is computed again
        computed = min(self.computed[request], last)
        for drafted, token in zip(self.drafts[request][:-1], request.tokens(computed, last), strict=False):
            if drafted != token:
                break
            computed += 1
        return computed

    # endregion

    def _release(self, request: Request) -> None:
        self.cache.release(request)
        del self.computed[request], self.drafts[request]
