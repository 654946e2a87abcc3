"""/v1/chat/completions."""

import json
import re
from typing import Any

from peers.asking import (
    CALCULATE,
    CHAT,
    HELLO,
    Asked,
    Case,
    Differs,
    Json,
    chat,
    logprobs,
    one_reason,
    streamed,
    usages,
)

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
IP = r"((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
LANGUAGES = ["Python", "Java", "Rust", "Swift"]
FUNCTION = {"type": "function", "function": {"name": "calculate", "parameters": CALCULATE}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}


def content(answer: Json) -> Any:
    return answer["choices"][0]["message"]["content"]


def is_person(answer: Json) -> bool:
    person = json.loads(content(answer))
    return set(person) == {"name", "age"} and 0 <= person["age"] < 100


PASSING: dict[str, Case] = {
    "vLLM: no logprobs": (chat(logprobs=False), lambda a: logprobs(a) is None),
    "vLLM: 0 top logprobs": (
        chat(logprobs=True, top_logprobs=0),
        lambda a: logprobs(a)["content"][0]["top_logprobs"] == [],
    ),
    "vLLM: 5 top logprobs": (
        chat(logprobs=True, top_logprobs=5),
        lambda a: len(logprobs(a)["content"][0]["top_logprobs"]) == 5,
    ),
    "vLLM: 0 prompt logprobs": (chat(prompt_logprobs=0), lambda a: len(a["prompt_logprobs"]) > 0),
    "vLLM: 1 prompt logprob": (chat(prompt_logprobs=1), lambda a: len(a["prompt_logprobs"]) > 0),
    "vLLM: no prompt logprobs": (chat(), lambda a: a["prompt_logprobs"] is None),
    "vLLM: a session and its usage": (
        chat(logprobs=True),
        lambda a: a["usage"]["completion_tokens"] == 5 and a["choices"][0]["finish_reason"] == "length",
    ),
    "vLLM: a stream has one reason": (streamed(chat()), one_reason),
    "vLLM: a stream without usage": (streamed(chat(), include_usage=False), lambda c: not any(usages(c))),
    "vLLM: a stream with usage": (
        streamed(chat(), include_usage=True),
        lambda c: c[-1]["choices"] == [] and c[-1]["usage"]["total_tokens"] > 0 and not any(usages(c)[:-1]),
    ),
    "vLLM: usage in each chunk": (
        streamed(chat(min_tokens=5), include_usage=True, continuous_usage_stats=True),
        lambda c: all(usages(c)) and c[-1]["usage"]["completion_tokens"] == 5,
    ),
    "vLLM: a choice": (
        chat(structured_outputs={"choice": LANGUAGES}, max_completion_tokens=10),
        lambda a: content(a) in LANGUAGES,
    ),
    "vLLM: a schema": (chat(structured_outputs={"json": PERSON}, max_completion_tokens=100), is_person),
    "vLLM: a regex": (
        chat(structured_outputs={"regex": IP}, max_completion_tokens=20),
        lambda a: re.fullmatch(IP, content(a)),
    ),
    "vLLM: a choice and logprobs": (
        chat(structured_outputs={"choice": LANGUAGES}, logprobs=True, top_logprobs=5),
        lambda a: all(item["logprob"] >= -9999 for item in logprobs(a)["content"][0]["top_logprobs"]),
    ),
    "vLLM: response_format json_object": (
        chat(response_format={"type": "json_object"}, max_completion_tokens=100),
        lambda a: a["choices"][0]["finish_reason"] == "length" or isinstance(json.loads(content(a)), dict),
    ),
    "vLLM: response_format json_schema": (chat(response_format=SCHEMA, max_completion_tokens=100), is_person),
    "vLLM: response_format text": (chat(response_format={"type": "text"}), content),
    "vLLM: a role of its own": (chat(messages=[{"role": "my-custom-role", "content": "Be brief."}, *HELLO]), content),
    "vLLM: more fields of a message": (chat(messages=[{**HELLO[0], "extra_field": "0"}]), content),
    "vLLM: a content of parts": (
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": "1+1?"}]}]),
        content,
    ),
    "vLLM: n choices": (chat(n=3), lambda a: [choice["index"] for choice in a["choices"]] == [0, 1, 2]),
    "vLLM: n choices of a seed": (chat(n=2, seed=42, temperature=0.8), lambda a: len(a["choices"]) == 2),
    "vLLM: n choices streamed": (
        streamed(chat(n=2)),
        lambda c: {choice["index"] for chunk in c for choice in chunk["choices"]} == {0, 1},
    ),
    "vLLM: a required call": (
        chat(tools=[FUNCTION], tool_choice="required", parallel_tool_calls=False, max_completion_tokens=100),
        lambda a: a["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "calculate",
    ),
    "vLLM: a named call": (
        chat(
            tools=[FUNCTION],
            tool_choice={"type": "function", "function": {"name": "calculate"}},
            max_completion_tokens=100,
        ),
        lambda a: json.loads(a["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])["sum"],
    ),
    "vLLM: tools and none": (
        chat(tools=[FUNCTION], tool_choice="none"),
        lambda a: not a["choices"][0]["message"].get("tool_calls"),
    ),
    "vLLM: tool_choice null": (chat(tool_choice=None), content),
    "llama.cpp: a chat": (
        chat(max_completion_tokens=8),
        lambda a: "cmpl" in a["id"] and a["usage"]["completion_tokens"] == 8,
    ),
    "llama.cpp: text parts": (
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": t} for t in ("What", "is")]}]),
        content,
    ),
    "llama.cpp: the role comes first": (
        streamed(chat()),
        lambda c: c[0]["choices"][0]["delta"]["role"] == "assistant" and len({chunk["id"] for chunk in c}) == 1,
    ),
    "llama.cpp: an assistant's message goes on": (
        chat(
            messages=[*HELLO, {"role": "assistant", "content": "A KV"}],
            continue_final_message=True,
            add_generation_prompt=False,
        ),
        content,
    ),
    "llama.cpp: json_object with a schema": (
        chat(response_format={"type": "json_object", "schema": {"const": "42"}}, max_completion_tokens=20),
        lambda a: content(a) == '"42"',
    ),
    "llama.cpp: json_schema of a constant": (
        chat(
            response_format={"type": "json_schema", "json_schema": {"schema": {"const": "foo"}}},
            max_completion_tokens=20,
        ),
        lambda a: content(a) == '"foo"',
    ),
    "llama.cpp: a grammar": (
        chat(structured_outputs={"grammar": 'root ::= "a"{5,5}'}, max_completion_tokens=20),
        lambda a: content(a) == "aaaaa",
    ),
    "llama.cpp: logprobs add up to the text": (
        chat(logprobs=True, top_logprobs=10),
        lambda a: "".join(token["token"] for token in logprobs(a)["content"]) == content(a),
    ),
    "llama.cpp: logit_bias excludes": (
        chat(logit_bias={"300": -100}, return_token_ids=True),
        lambda a: 300 not in a["choices"][0]["token_ids"],
    ),
}
WRONG: dict[str, Asked] = {
    **{
        f"llama.cpp: messages {json.dumps(wrong)}": chat(messages=wrong)
        for wrong in (None, "string", [123], [{}], [{"role": 123}], [{"role": "system", "content": 123}], [*HELLO, {}])
    },
    "vLLM: 21 top logprobs": chat(logprobs=True, top_logprobs=21),
    "vLLM: 21 top logprobs streamed": streamed(chat(logprobs=True, top_logprobs=21)),
    "vLLM: -1 prompt logprobs": chat(prompt_logprobs=-1),
    "vLLM: stream_options without a stream": chat(stream_options={"include_usage": True}),
    "vLLM: a regex that is an object": chat(structured_outputs={"regex": {"1": "Python"}}),
    "vLLM: a seed beyond 64 bits": chat(seed=1 << 63),
    "vLLM: a seed below 64 bits": chat(seed=-(1 << 63) - 1),
    "vLLM: a biased token outside the vocabulary": chat(logit_bias={"999999": 1}),
    "vLLM: a body that is a list": (CHAT, []),
    "llama.cpp: response_format sound": chat(response_format={"type": "sound"}),
    "llama.cpp: a schema that is a number": chat(response_format={"type": "json_object", "schema": 123}),
    "llama.cpp: a type that is a number": chat(response_format={"type": "json_object", "schema": {"type": 123}}),
    "llama.cpp: a type that is none": chat(response_format={"type": "json_object", "schema": {"type": "hiccup"}}),
}
REFUSED: dict[str, Differs] = {
    "vLLM: min_characters": (chat(min_characters=10), "not a field of any API: unknown fields are named"),
    "vLLM: echo of a chat": (chat(echo=True), "the messages are the client's own"),
    "vLLM: a chat template in a request": (
        chat(chat_template="{{ messages }}"),
        "a template is code; it is the operator's",
    ),
    "vLLM: structural tags": (chat(structured_outputs={"structural_tag": "{}"}), "tools and reasoning have fields"),
    "llama.cpp: json_schema": (chat(json_schema={"const": "42"}), "response_format; the error says so"),
    "llama.cpp: grammar": (chat(grammar='root ::= "a"'), "structured_outputs.grammar; the error says so"),
    "llama.cpp: timings_per_token": (streamed(chat(timings_per_token=True)), "/metrics, and usage in each chunk"),
    "llama.cpp: another model's name": (
        chat(model="gpt-3.5-turbo-instruct"),
        "a wrong name is an error, not another model",
    ),
}
MORE: dict[str, Differs] = {
    "llama.cpp: two messages of the assistant": (
        chat(messages=[*HELLO, *[{"role": "assistant", "content": "a"}] * 2]),
        "templates take them",
    ),
}
