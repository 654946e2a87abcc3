"""Endpoints of OpenAI's API that are not for text generation: one clear error, also for the official client."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest

from phase6_integration.api.settings import ServerSettings
from phase6_integration.app import create_app
from phase6_integration.wings.edge.not_served import WHAT
from tests.phase6_integration.fake_engine import FakeEngine, client

Call = Callable[[openai.AsyncOpenAI], Awaitable[Any]]
CALLS: dict[str, Call] = {
    "embeddings": lambda ours: ours.embeddings.create(model="tiny_chat", input="Hello"),
    "moderation": lambda ours: ours.moderations.create(input="Hello"),
    "images": lambda ours: ours.images.generate(prompt="a page"),
    "audio": lambda ours: ours.audio.transcriptions.create(model="tiny_chat", file=("a.wav", b"RIFF")),
    "files": lambda ours: ours.files.create(file=("a.jsonl", b"{}"), purpose="batch"),
    "batches": lambda ours: ours.batches.list(),
}


@pytest.mark.parametrize("what", CALLS)
def test_the_openai_client_is_told_what_is_not_supported_and_what_is(what: str) -> None:
    async def send() -> None:
        async with client(FakeEngine()) as http:
            await CALLS[what](openai.AsyncOpenAI(base_url="http://front/v1", api_key="none", http_client=http))

    with pytest.raises(openai.NotFoundError) as refused:
        asyncio.run(send())
    assert refused.value.code == "unsupported_endpoint"
    assert refused.value.message
    assert what in str(refused.value)
    assert "/v1/chat/completions" in str(refused.value)


def test_nothing_that_is_served_is_refused() -> None:
    served = create_app(FakeEngine(), ServerSettings()).openapi()["paths"]
    assert not [path for path in served for start in WHAT if path == start or path.startswith(f"{start}/")]


def test_no_word_of_it_without_a_key() -> None:
    async def send() -> tuple[int, str]:
        async with client(FakeEngine(), ServerSettings(api_keys=("a-key",))) as http:
            response = await http.post("/v1/embeddings", content=b"no json", headers={"content-type": "text/plain"})
            return response.status_code, json.loads(response.content)["error"]["code"]

    assert asyncio.run(send()) == (401, "invalid_api_key")
