"""What transformers generates, token for token, comes over HTTP: to many clients at once, while others hang up."""

import asyncio
import random
from pathlib import Path

import pytest

from tests.phase2_prefill_decode.test_identity import prompts
from tests.phase6_integration.running import Oracle, answer, ask, idle, line, request, run, serving

LENGTHS = (1, 2, 15, 16, 17, 31, 40, 50, 64, 90)
OUTPUT = 48
STAY, LEAVE = 64, 32


@pytest.mark.parametrize(
    "pages",
    [pytest.param(80, id="pages for a few"), pytest.param(1000, id="pages for all", marks=pytest.mark.slow)],
)
def test_greedy_float32_over_http_is_what_transformers_generates(tmp_path: Path, pages: int) -> None:
    """With pages for a few, requests are preempted and computed again, without a trace in their answers."""
    oracle = Oracle.saved(tmp_path)
    given = prompts(oracle.model.config.vocab_size, LENGTHS)
    wanted = oracle.answers(given, OUTPUT)

    def body(number: int) -> dict[str, object]:
        prompt = given[number % len(given)]
        stream = bool(number % 2)
        return {"prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "logprobs": 0, "stream": stream}

    async def leaves(url: str, number: int, after: int) -> None:
        async with line(url, request(body(number))) as reader:
            for _ in range(after):
                await reader.readline()

    async def test(url: str) -> None:
        draw = random.Random(0)
        staying = [ask(url, body(number)) for number in range(STAY)]
        leaving = [leaves(url, 2 * number + 1, draw.randrange(120)) for number in range(LEAVE)]
        answers, _ = await asyncio.gather(asyncio.gather(*staying), asyncio.gather(*leaving))
        for number, response in enumerate(answers):
            assert answer(response) == wanted[number % len(given)]
        stats = await idle(url)
        assert stats["requests"]["finished"]["length"] >= STAY
        assert (stats["requests"]["preemptions"] > 0) == (pages == 80)

    with serving(str(tmp_path), "--dtype", "float32", "--kv-cache-pages", str(pages)) as (_, url):
        run(test(url))
