"""/tokenize and /detokenize: texts and conversations into tokens, and back."""

import asyncio
import threading
from typing import Any

import httpx2
import pytest

from phase0_request.tokenizer import Tokenizer
from phase6_integration.api import tokenization
from tests.phase6_integration.fake_engine import FakeEngine, client
from tests.phase6_integration.streams import HELLO, post

TOKENIZER = Tokenizer.from_pretrained()
TEXTS = ["Hello there", "", " leading", "caf\u00e9 \U0001f600", "line\nline\ttab", "a<|im_end|>b", "word " * 5000]


@pytest.mark.parametrize("text", TEXTS)
def test_tokenize_and_detokenize(text: str) -> None:
    engine = FakeEngine()
    response = post(engine, "/tokenize", prompt=text, return_token_strs=True)
    answer = response.json()
    tokens = answer["tokens"]
    assert tokens == TOKENIZER.encode(text)
    assert (answer["count"], answer["max_model_len"], len(answer["token_strs"])) == (len(tokens), 2048, len(tokens))
    assert post(engine, "/detokenize", tokens=tokens).json() == {"prompt": TOKENIZER.decode(tokens)}


def test_tokenize_a_conversation() -> None:
    response = post(FakeEngine(), "/tokenize", messages=HELLO)
    assert response.json() == {
        "count": len(TOKENIZER.chat(HELLO)),
        "max_model_len": 2048,
        "tokens": TOKENIZER.chat(HELLO),
        "token_strs": None,
    }
    without = post(FakeEngine(), "/tokenize", messages=HELLO, add_generation_prompt=False).json()
    assert without["tokens"] == TOKENIZER.chat(HELLO, add_generation_prompt=False)


def test_a_text_or_a_conversation_but_not_both() -> None:
    for body in ({"prompt": "a", "messages": HELLO}, {}):
        assert post(FakeEngine(), "/tokenize", **body).status_code == 400


def test_a_text_of_more_tokens_than_any_request_may_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenization, "MAX_TOKENS", 3)
    refused = post(FakeEngine(), "/tokenize", prompt="one two three four")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
    assert "more than 3 tokens" in refused.text


def test_when_too_many_texts_wait_for_the_tokenizer_one_more_is_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    refused, encode = threading.Event(), Tokenizer.encode_batch

    def held(*text: Any) -> Any:
        assert refused.wait(60.0)
        return encode(*text)

    async def send() -> tuple[httpx2.Response, httpx2.Response]:
        async with client(FakeEngine(max_num_queued_reqs=1)) as http:
            both = [asyncio.create_task(http.post("/tokenize", json={"prompt": "Hello"})) for _ in range(2)]
            (first,), (second,) = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            refused.set()
            return await first, await second

    monkeypatch.setattr(Tokenizer, "encode_batch", held)
    first, second = asyncio.run(send())
    assert (first.status_code, first.json()["error"]["code"]) == (503, "tokenizer_busy")
    assert second.status_code == 200
    assert int(first.headers["retry-after"]) > 0
