"""Ollama's client for Python: chats, streams, tools, formats, and errors."""

import json

import pytest
from ollama import Client, ResponseError
from subject import CITIES, QUESTION, TOOL, Report, Server, get_weather

GREEDY = {"temperature": 0, "num_predict": 64}


@pytest.fixture
def client(server: Server) -> Client:
    return Client(host=server.url.removesuffix("/v1"), headers={"Authorization": f"Bearer {server.key}"})


def test_a_chat_whole_and_streamed(server: Server, client: Client) -> None:
    asked = {"model": server.model, "messages": [{"role": "user", "content": QUESTION}], "options": GREEDY}
    whole = client.chat(**asked)
    assert whole.message.content
    assert whole.done_reason in ("stop", "length")
    assert whole.eval_count > 0 < whole.prompt_eval_count
    parts = list(client.chat(**asked, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert [part.done for part in parts][-2:] == [False, True]


def test_a_text_whole_and_streamed(server: Server, client: Client) -> None:
    asked = {"model": server.model, "prompt": QUESTION, "system": "Be brief.", "options": GREEDY, "keep_alive": "5m"}
    whole = client.generate(**asked)
    assert whole.response
    assert "".join(part.response for part in client.generate(**asked, stream=True)) == whole.response


def test_an_answer_follows_a_schema(server: Server, client: Client) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    answer = client.chat(server.model, messages, format=Report.model_json_schema(), options=GREEDY)
    Report.model_validate_json(answer.message.content)
    short = client.chat(server.model, messages, format="json", options={"temperature": 0, "num_predict": 400})
    assert short.done_reason == "length" or isinstance(json.loads(short.message.content), dict)


def test_tools_and_their_results_are_a_conversation(server: Server, client: Client) -> None:
    """A call is up to the model, so the one here is written for it."""
    call = {"function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": get_weather("Oslo"), "tool_name": "get_weather"},
    ]
    answer = client.chat(server.model, messages, tools=[TOOL], options=GREEDY)
    assert answer.message.content or answer.message.tool_calls
    for made in answer.message.tool_calls or ():
        assert made.function.arguments["city"] in CITIES


def test_the_model_is_listed(server: Server, client: Client) -> None:
    assert server.model in [model.model for model in client.list().models]


def test_errors_have_a_status_and_words(server: Server, client: Client) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    with pytest.raises(ResponseError, match="there is no such model") as missing:
        client.chat("other", messages)
    assert missing.value.status_code == 404
    with pytest.raises(ResponseError, match=r"options\.temperature"):
        client.chat(server.model, messages, options={"temperature": -1})
    with pytest.raises(ResponseError, match="images"):
        client.generate(server.model, QUESTION, images=[b"PNG"])
