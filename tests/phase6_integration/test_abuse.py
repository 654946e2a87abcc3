"""Clients that ask for much and hang up: what they asked for goes with them, at once."""

import asyncio
from pathlib import Path
from time import perf_counter

import pytest

from tests.phase6_integration.running import Oracle, answer, ask, idle, line, request, run, serving

CONTEXT = 16_384
LONG = 10_000  # tokens of each prompt, or of each answer: none ends within half a second
SOON = 5.0  # seconds in which a request must be answered behind them


def body(number: int) -> dict[str, object]:
    """Half of them bring a long prompt, and half want a long answer; half of them stream."""
    prompt = [(number + i * i) % 4000 + 3 for i in range(LONG if number % 2 else 10)]
    return {"prompt": prompt, "max_tokens": 6_000 if number % 2 else LONG, "stream": number % 4 < 2}


@pytest.mark.parametrize("clients", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_a_client_that_hangs_up_leaves_nothing_behind(tmp_path: Path, clients: int) -> None:
    """What comes behind them is answered soon, and in the end every page is free or cached."""
    oracle = Oracle.saved(
        tmp_path,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
    )
    prompt = [5, 6, 7, 8]
    (wanted,) = oracle.answers([prompt], 24)

    async def hangs_up(url: str, number: int) -> None:
        async with line(url, request(body(number))) as reader:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await reader.read()

    async def test(url: str) -> None:
        await asyncio.gather(*(hangs_up(url, number) for number in range(clients)))
        start = perf_counter()
        last = await ask(url, {"prompt": prompt, "max_tokens": 24, "temperature": 0, "logprobs": 0})
        seconds = perf_counter() - start
        assert answer(last) == wanted
        stats = await idle(url)
        assert stats["requests"]["finished"]["length"] == 1, "no other request was completed"
        print(f"{clients} clients hung up; the next request took {seconds:.2f} s; {stats['requests']}")
        if clients == 200:
            assert seconds < SOON

    with serving(str(tmp_path), "--dtype", "float32", "--kv-cache-pages", "4096") as (_, url):
        run(test(url))
