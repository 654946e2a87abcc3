"""Cases of the API tests of vLLM, llama.cpp and SGLang that end otherwise here, with the reason."""

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import pytest

from phase6_integration.api.settings import ServerSettings
from tests.phase6_integration.fake_engine import FakeEngine, client
from tests.phase6_integration.posting import CHAT, COMPLETE, HELLO, PROMPT

PAGE = Path(__file__).parents[1] / "clients/README.md"
ASKED = HELLO["messages"]
EMBED, MESSAGES = "/v1/embeddings", "/v1/messages"
OWN_API = "an API of its own: the same is at /v1/completions"
IMAGE = [{"role": "user", "content": [{"type": "image", "source": {"type": "base64"}}]}]
Case = tuple[str, dict[str, Any], str]  # a path, fields of the body and why

REFUSED: dict[str, Case] = {  # the peer answers
    "vLLM: truncation_side right": (
        COMPLETE,
        {"truncate_prompt_tokens": 2, "truncation_side": "right"},
        "the end of a prompt is kept",
    ),
    "vLLM: /invocations": ("/invocations", HELLO, "a route of SageMaker"),
    "vLLM: min_characters": (CHAT, {"min_characters": 10}, "not a field of any API: unknown fields are named"),
    "vLLM: use_beam_search": (COMPLETE, {"use_beam_search": True, "n": 2}, "there is no beam search"),
    "vLLM: echo of a chat": (CHAT, {"echo": True}, "the messages are the client's own"),
    "vLLM: a chat template in a request": (
        CHAT,
        {"chat_template": "{{ messages }}"},
        "a template is code; it is the operator's",
    ),
    "vLLM: prompt_embeds": (
        COMPLETE,
        {"prompt_embeds": "AAAA"},
        "embeddings are deserialized data, and bypass the tokenizer",
    ),
    "vLLM: structural tags": (
        CHAT,
        {"structured_outputs": {"structural_tag": "{}"}},
        "tools and reasoning have fields",
    ),
    "llama.cpp: /completion": ("/completion", {"prompt": "a"}, OWN_API),
    "llama.cpp: n_predict": (COMPLETE, {"n_predict": 8}, "max_tokens; the error says so"),
    "llama.cpp: n_probs": (COMPLETE, {"n_probs": 10}, "logprobs"),
    "llama.cpp: json_schema": (CHAT, {"json_schema": {"const": "42"}}, "response_format; the error says so"),
    "llama.cpp: grammar": (CHAT, {"grammar": 'root ::= "a"'}, "structured_outputs.grammar; the error says so"),
    "llama.cpp: timings_per_token": (CHAT, {"timings_per_token": True}, "/metrics, and usage in each chunk"),
    "llama.cpp: cache_prompt": (COMPLETE, {"cache_prompt": False}, "every prompt is cached; cache_salt separates"),
    "llama.cpp: response_fields": (COMPLETE, {"response_fields": ["content"]}, OWN_API),
    "llama.cpp: another model's name": (CHAT, {"model": "gpt-3.5"}, "a wrong name is an error, not another model"),
    "llama.cpp: /apply-template": (
        "/apply-template",
        {"messages": ASKED},
        "/tokenize has its tokens, and /detokenize its text",
    ),
    "llama.cpp: content to tokenize": ("/tokenize", {"content": "text"}, "prompt, as vLLM has it"),
    "llama.cpp: text and tokens in one prompt": (
        COMPLETE,
        {"prompt": [5, 6, "text"]},
        "the tokens of a text depend on what is before it",
    ),
    "llama.cpp: texts and tokens to embed": (
        EMBED,
        {"input": ["text", [5, 6]]},
        "a list is of one kind, as OpenAI has it",
    ),
    "llama.cpp: objects to embed": (EMBED, {"input": {"prompt_string": "a"}}, "strings and tokens, as OpenAI has it"),
    "llama.cpp: an empty text to embed": (EMBED, {"input": ""}, "there is no last token"),
    "llama.cpp: pooling mean": (EMBED, {"input": "a", "pooling": "mean"}, "cached tokens have no hidden states"),
    "llama.cpp: images": (MESSAGES, {"messages": IMAGE}, "the models read text"),
}
ANSWERED: dict[str, Case] = {  # the peer refuses
    "SGLang: temperature 2": (MESSAGES, {"temperature": 2.0}, "the sampler takes up to 100, here as everywhere"),
    "SGLang: an unknown anthropic-beta": (MESSAGES, {}, "a header announces fields, and those are checked"),
    "llama.cpp: two messages of the assistant": (
        CHAT,
        {"messages": [*ASKED, *[{"role": "assistant", "content": "a"}] * 2]},
        "templates take them",
    ),
}
ALL = REFUSED | ANSWERED
BODIES = {COMPLETE: PROMPT, CHAT: HELLO, MESSAGES: HELLO}


@pytest.fixture(scope="module")
def responses() -> dict[str, httpx2.Response]:
    async def ask() -> dict[str, httpx2.Response]:
        cases = {name: (path, {**BODIES.get(path, {}), **fields}) for name, (path, fields, _) in ALL.items()}
        async with client(FakeEngine(), ServerSettings()) as http:
            http.headers["anthropic-beta"] = "advanced-tool-use-2025-11-20"
            return {name: await http.post(path, json=body) for name, (path, body) in cases.items()}

    return asyncio.run(ask())


@pytest.mark.parametrize("name", ALL)
def test_it_ends_as_the_page_says_and_an_error_has_words(name: str, responses: dict[str, httpx2.Response]) -> None:
    response = responses[name]
    if name in ANSWERED:
        assert response.status_code == 200, response.content
    else:
        assert response.status_code in (400, 404)
        assert response.json()["error"]["message"]
    assert f"| {name} | {ALL[name][2]} |" in PAGE.read_text()
