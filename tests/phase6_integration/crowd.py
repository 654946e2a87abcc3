"""A crowd of clients of every kind: orderly, slow, with invalid requests, hanging up, reading nothing."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.phase6_integration.running import Answer, answer, ask, get, line, parsed, request

LENGTHS = (1, 2, 3, 5, 8, 15, 16, 17, 24, 31, 32, 33, 40, 48, 60, 64)
OUTPUT = 12
AT_ONCE = 48  # clients
INVALID: Sequence[object] = [  # `test_refusals` has them all
    *(b"", b"null", b"\xff\xfe\x00" * 50, b"[" * 20_000, b'{"prompt": "a", "temperature": NaN}'),
    *({"prompt": prompt} for prompt in ([], [-1], [4096], [1] * 300, [[1]] * 129)),
    *({"prompt": [1], **more} for more in ({"max_tokens": 10**9}, {"n": 129}, {"temperature": -1}, {"top_p": 1e400})),
    *({"prompt": "a", **more} for more in ({"stop": ["x"] * 17}, {"nothing": "such"}, {"model": "another"})),
]


@dataclass(frozen=True)
class Crowd:
    """What the clients do. `draw` is the same on every run, though not the order in which they come to their turns."""

    url: str
    given: Sequence[list[int]]
    wanted: Sequence[Answer]
    done: Counter[str]

    def body(self, draw: random.Random, which: int) -> dict[str, Any]:
        return {
            "prompt": self.given[which],
            "max_tokens": OUTPUT,
            "temperature": 0,
            "logprobs": draw.choice((0, 3)),
            "stream": draw.random() < 0.5,
        }

    async def orderly(self, draw: random.Random) -> None:
        which = draw.randrange(len(self.given))
        assert answer(await ask(self.url, self.body(draw, which))) == self.wanted[which]

    async def slow(self, draw: random.Random) -> None:
        """It reads a few bytes at a time, and asks for more than it can hold. It gets its answer all the same."""
        which = draw.randrange(len(self.given))
        said = request(self.body(draw, which) | {"logprobs": 20, "stream": True})
        async with line(self.url, said, buffer=2048) as reader:
            pieces = []
            while piece := await reader.read(512):
                pieces.append(piece)
                await asyncio.sleep(0.001)
        assert answer(parsed(b"".join(pieces))) == self.wanted[which]

    async def several(self, draw: random.Random) -> None:
        """Sampled, not greedy: the words are unknown, their number is not."""
        seeds = {"n": draw.randrange(1, 5), "temperature": 1.0, "seed": draw.randrange(1 << 32)}
        prompt = draw.choice(self.given)
        one = await ask(self.url, {"prompt": prompt, "max_tokens": OUTPUT, **seeds})
        again = await ask(self.url, {"prompt": prompt, "max_tokens": OUTPUT, **seeds})
        assert len(one.json["choices"]) == seeds["n"]
        assert one.json["choices"] == again.json["choices"], "a seed fixes the tokens in any batch"

    async def invalid(self, draw: random.Random) -> None:
        response = await ask(self.url, draw.choice(INVALID))
        assert response.status in (400, 404), response
        assert response.error["message"]

    async def leaves(self, draw: random.Random) -> None:
        """Somewhere in its own request, or somewhere in the response."""
        said = request(self.body(draw, draw.randrange(len(self.given))) | {"n": draw.choice((1, 3)), "max_tokens": 100})
        if draw.random() < 0.3:
            said = said[: draw.randrange(len(said))]
            async with line(self.url, said):
                return
        async with line(self.url, said) as reader:
            for _ in range(draw.randrange(40)):
                await reader.readline()

    async def looks(self, _: random.Random) -> None:
        for path in ("/metrics", "/stats", "/health", "/v1/models"):
            assert (await get(self.url, path)).status == 200

    async def reads_nothing(self, prompt: list[int], stream: bool, over: asyncio.Event) -> None:
        """It asks for a lot, reads none of it, and stays until all the others have left."""
        body = {"prompt": prompt, "max_tokens": 60, "n": 16, "logprobs": 20, "stream": stream}
        async with line(self.url, request(body), buffer=2048):
            await over.wait()

    async def rush(self, first: int, requests: int) -> None:
        """So many of them, `AT_ONCE` at a time."""
        kinds: dict[Callable[[random.Random], Awaitable[None]], int] = {
            self.orderly: 60,
            self.slow: 5,
            self.several: 5,
            self.invalid: 12,
            self.leaves: 17,
            self.looks: 1,
        }
        turns = iter(range(first, first + requests))
        over = asyncio.Event()

        async def clients() -> None:
            for number in turns:
                draw = random.Random(number)
                (kind,) = draw.choices(list(kinds), list(kinds.values()))
                await kind(draw)
                self.done[kind.__name__] += 1

        deaf = [asyncio.create_task(self.reads_nothing(self.given[i], i % 2 > 0, over)) for i in range(4)]
        await asyncio.gather(*(clients() for _ in range(AT_ONCE)))
        over.set()
        await asyncio.gather(*deaf)
