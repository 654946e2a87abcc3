"""The cases of other servers' own API tests, in our words: what each asks for, and what must hold of the answer.

They are those of vLLM (`tests/entrypoints/openai`), llama.cpp (`tools/server/tests/unit`) and SGLang (`test/anthropic`)
that ask over HTTP and do not need a model of theirs. What their tests accept and this server refuses is in `REFUSED`,
with the reason.
"""

import json
import re
from base64 import b64decode
from collections.abc import Callable
from typing import Any

Json = Any
Holds = Callable[[Json], object]
CHAT, COMPLETE, MESSAGES, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/embeddings"
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1+1?"}]
HELLO = [{"role": "user", "content": "Hello"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
IP = r"((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
LANGUAGES = ["Python", "Java", "Rust", "Swift"]
CALCULATE = {
    "type": "object",
    "properties": {"sum": {"enum": ["2+2", "3*3"]}},
    "required": ["sum"],
    "additionalProperties": False,
}
FUNCTION = {"type": "function", "function": {"name": "calculate", "parameters": CALCULATE}}
TOOL = {"name": "calculate", "description": "arithmetic", "input_schema": CALCULATE}
OTHER = {**TOOL, "name": "other"}
USE = {
    "role": "assistant",
    "content": [{"type": "tool_use", "id": "one", "name": "calculate", "input": {"sum": "2+2"}}],
}
RESULT = {"type": "tool_result", "tool_use_id": "one", "content": "4"}


def chat(**fields: Any) -> tuple[str, Json]:
    return CHAT, {"messages": ASKED, "max_completion_tokens": 5, "temperature": 0, **fields}


def complete(**fields: Any) -> tuple[str, Json]:
    return COMPLETE, {"prompt": "Hello, my name is", "max_tokens": 5, "temperature": 0, **fields}


def messages(**fields: Any) -> tuple[str, Json]:
    return MESSAGES, {"model": "tiny_chat", "max_tokens": 50, "messages": HELLO, **fields}


def user(content: Any) -> tuple[str, Json]:
    return messages(messages=[{"role": "user", "content": content}])


def count(**fields: Any) -> tuple[str, Json]:
    return f"{MESSAGES}/count_tokens", {"model": "tiny_chat", "messages": HELLO, **fields}


def embed(given: Any, **fields: Any) -> tuple[str, Json]:
    return EMBED, {"input": given, **fields}


def streamed(asked: tuple[str, Json], **options: Any) -> tuple[str, Json]:
    return asked[0], {**asked[1], "stream": True, **({"stream_options": options} if options else {})}


def content(answer: Json) -> Any:
    return answer["choices"][0]["message"]["content"]


def logprobs(answer: Json) -> Any:
    return answer["choices"][0]["logprobs"]


def length(answer: Json) -> float:
    return sum(number * number for number in answer["data"][0]["embedding"])


def one_reason(chunks: list[Json]) -> bool:
    return sum(bool(c["choices"] and c["choices"][0]["finish_reason"]) for c in chunks) == 1


def usages(chunks: list[Json]) -> list[Any]:
    return [chunk.get("usage") for chunk in chunks]


def kinds(events: list[Json]) -> list[str]:
    return list(dict.fromkeys(event["type"] for event in events))


EVENTS = ["content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop"]
EVENTS = ["message_start", *EVENTS]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}


def is_person(answer: Json) -> bool:
    person = json.loads(content(answer))
    return set(person) == {"name", "age"} and 0 <= person["age"] < 100


def calls(answer: Json) -> Any:
    return [block for block in answer["content"] if block["type"] == "tool_use"]


VLLM: dict[str, tuple[tuple[str, Json], Holds]] = {
    "no logprobs": (chat(logprobs=False), lambda a: logprobs(a) is None),
    "0 top logprobs": (chat(logprobs=True, top_logprobs=0), lambda a: logprobs(a)["content"][0]["top_logprobs"] == []),
    "5 top logprobs": (
        chat(logprobs=True, top_logprobs=5),
        lambda a: len(logprobs(a)["content"][0]["top_logprobs"]) == 5,
    ),
    "0 prompt logprobs": (chat(prompt_logprobs=0), lambda a: len(a["prompt_logprobs"]) > 0),
    "1 prompt logprob": (chat(prompt_logprobs=1), lambda a: len(a["prompt_logprobs"]) > 0),
    "no prompt logprobs": (chat(), lambda a: a["prompt_logprobs"] is None),
    "a session and its usage": (
        chat(logprobs=True),
        lambda a: a["usage"]["completion_tokens"] == 5 and a["choices"][0]["finish_reason"] == "length",
    ),
    "a stream has one reason": (streamed(chat()), one_reason),
    "a stream without usage": (streamed(chat(), include_usage=False), lambda c: not any(usages(c))),
    "a stream with usage": (
        streamed(chat(), include_usage=True),
        lambda c: c[-1]["choices"] == [] and c[-1]["usage"]["total_tokens"] > 0 and not any(usages(c)[:-1]),
    ),
    "usage in each chunk": (
        streamed(chat(min_tokens=5), include_usage=True, continuous_usage_stats=True),
        lambda c: all(usages(c)) and c[-1]["usage"]["completion_tokens"] == 5,
    ),
    "a choice": (
        chat(structured_outputs={"choice": LANGUAGES}, max_completion_tokens=10),
        lambda a: content(a) in LANGUAGES,
    ),
    "a schema": (chat(structured_outputs={"json": PERSON}, max_completion_tokens=100), is_person),
    "a regex": (
        chat(structured_outputs={"regex": IP}, max_completion_tokens=20),
        lambda a: re.fullmatch(IP, content(a)),
    ),
    "a choice and logprobs": (
        chat(structured_outputs={"choice": LANGUAGES}, logprobs=True, top_logprobs=5),
        lambda a: all(item["logprob"] >= -9999 for item in logprobs(a)["content"][0]["top_logprobs"]),
    ),
    "response_format json_object": (
        chat(response_format={"type": "json_object"}, max_completion_tokens=100),
        lambda a: a["choices"][0]["finish_reason"] == "length" or isinstance(json.loads(content(a)), dict),
    ),
    "response_format json_schema": (chat(response_format=SCHEMA, max_completion_tokens=100), is_person),
    "response_format text": (chat(response_format={"type": "text"}), content),
    "a role of its own": (chat(messages=[{"role": "my-custom-role", "content": "Be brief."}, *HELLO]), content),
    "more fields of a message": (chat(messages=[{**HELLO[0], "extra_field": "0"}]), content),
    "a content of parts": (chat(messages=[{"role": "user", "content": [{"type": "text", "text": "1+1?"}]}]), content),
    "n choices": (chat(n=3), lambda a: [choice["index"] for choice in a["choices"]] == [0, 1, 2]),
    "n choices of a seed": (chat(n=2, seed=42, temperature=0.8), lambda a: len(a["choices"]) == 2),
    "n choices streamed": (
        streamed(chat(n=2)),
        lambda c: {choice["index"] for chunk in c for choice in chunk["choices"]} == {0, 1},
    ),
    "a required call": (
        chat(tools=[FUNCTION], tool_choice="required", parallel_tool_calls=False, max_completion_tokens=100),
        lambda a: a["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "calculate",
    ),
    "a named call": (
        chat(
            tools=[FUNCTION],
            tool_choice={"type": "function", "function": {"name": "calculate"}},
            max_completion_tokens=100,
        ),
        lambda a: json.loads(a["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])["sum"],
    ),
    "tools and none": (
        chat(tools=[FUNCTION], tool_choice="none"),
        lambda a: not a["choices"][0]["message"].get("tool_calls"),
    ),
    "tool_choice null": (chat(tool_choice=None), content),
    "a completion": (
        complete(ignore_eos=True),
        lambda a: a["usage"]["completion_tokens"] == 5 and "cached_tokens" in a["usage"]["prompt_tokens_details"],
    ),
    "a prompt of ids": (complete(prompt=[5, 5, 5]), lambda a: a["choices"][0]["text"] is not None),
    "ids come back": (
        complete(prompt=[5, 6, 7], return_token_ids=True),
        lambda a: a["choices"][0]["prompt_token_ids"] == [5, 6, 7],
    ),
    "a truncated prompt": (
        complete(
            prompt=[*range(5, 13)],
            max_tokens=1,
            truncate_prompt_tokens=4,
            truncation_side="left",
            return_token_ids=True,
        ),
        lambda a: a["choices"][0]["prompt_token_ids"] == [9, 10, 11, 12],
    ),
    "completions: 0 logprobs": (complete(logprobs=0), lambda a: len(logprobs(a)["top_logprobs"][0]) == 1),
    "completions: 5 logprobs": (complete(logprobs=5), lambda a: 5 <= len(logprobs(a)["top_logprobs"][0]) <= 6),
    "completions: prompt logprobs": (
        complete(prompt=["A robot", "My name is"], prompt_logprobs=0),
        lambda a: all(choice["prompt_logprobs"] for choice in a["choices"]),
    ),
    "completions: a stream": (streamed(complete()), one_reason),
    "completions: n": (complete(n=3, temperature=1), lambda a: len(a["choices"]) == 3),
    "completions: empty stream_options": (streamed(complete(stream_options={})), lambda c: not any(usages(c))),
    "completions: a list of prompts": (
        complete(prompt=["a", "b"]),
        lambda a: [c["index"] for c in a["choices"]] == [0, 1],
    ),
    "completions: echo": (complete(echo=True), lambda a: a["choices"][0]["text"].startswith("Hello, my name is")),
    "completions: logit_bias": (
        complete(prompt=[5], logit_bias={"300": 100}, return_token_ids=True),
        lambda a: a["choices"][0]["token_ids"] == [300] * 5,
    ),
    "completions: allowed tokens": (
        complete(allowed_token_ids=[300, 301], return_token_ids=True),
        lambda a: {*a["choices"][0]["token_ids"]} <= {300, 301},
    ),
    "tokenize and the ids of a chat": (
        ("/tokenize", {"messages": HELLO}),
        lambda a: a["count"] == len(a["tokens"]) > 0,
    ),
    "detokenize": (("/detokenize", {"tokens": [300, 301]}), lambda a: a["prompt"]),
    "embeddings of ids": (embed([[5, 6], [7]]), lambda a: a["usage"]["prompt_tokens"] == 3),
    "embeddings: dimensions": (embed("text", dimensions=8), lambda a: len(a["data"][0]["embedding"]) == 8),
}
LLAMA_CPP: dict[str, tuple[tuple[str, Json], Holds]] = {
    "a chat": (chat(max_completion_tokens=8), lambda a: "cmpl" in a["id"] and a["usage"]["completion_tokens"] == 8),
    "text parts": (
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": t} for t in ("What", "is")]}]),
        content,
    ),
    "the role comes first": (
        streamed(chat()),
        lambda c: c[0]["choices"][0]["delta"]["role"] == "assistant" and len({chunk["id"] for chunk in c}) == 1,
    ),
    "an assistant's message goes on": (
        chat(
            messages=[*HELLO, {"role": "assistant", "content": "A KV"}],
            continue_final_message=True,
            add_generation_prompt=False,
        ),
        content,
    ),
    "json_object with a schema": (
        chat(response_format={"type": "json_object", "schema": {"const": "42"}}, max_completion_tokens=20),
        lambda a: content(a) == '"42"',
    ),
    "json_schema of a constant": (
        chat(
            response_format={"type": "json_schema", "json_schema": {"schema": {"const": "foo"}}},
            max_completion_tokens=20,
        ),
        lambda a: content(a) == '"foo"',
    ),
    "a grammar": (
        chat(structured_outputs={"grammar": 'root ::= "a"{5,5}'}, max_completion_tokens=20),
        lambda a: content(a) == "aaaaa",
    ),
    "logprobs add up to the text": (
        chat(logprobs=True, top_logprobs=10),
        lambda a: "".join(token["token"] for token in logprobs(a)["content"]) == content(a),
    ),
    "logit_bias excludes": (
        chat(logit_bias={"300": -100}, return_token_ids=True),
        lambda a: 300 not in a["choices"][0]["token_ids"],
    ),
    "completions by the client": (
        complete(max_tokens=8, ignore_eos=True),
        lambda a: a["choices"][0]["finish_reason"] == "length",
    ),
    "ids, twice": (complete(prompt=[[5, 6], [5, 6]]), lambda a: a["choices"][0]["text"] == a["choices"][1]["text"]),
    "stop strings": (complete(stop=["zzz"], max_tokens=20), lambda a: "zzz" not in a["choices"][0]["text"]),
    "tokenize": (("/tokenize", {"prompt": "What is the capital of France?"}), lambda a: len(a["tokens"]) > 5),
    "tokenize with pieces": (
        ("/tokenize", {"prompt": "unicode 媽 and emoji 🤗", "return_token_strs": True}),
        lambda a: all(a["token_strs"]) and len(a["token_strs"]) == a["count"],
    ),
    "an embedding of length 1": (embed("I believe the meaning of life is"), lambda a: abs(length(a) - 1) < 1e-3),
    "embeddings": (embed(["one", "two", "three", "four"]), lambda a: len(a["data"]) == 4),
    "long embeddings": (embed([f"{letter} " * 256 for letter in "abcd"]), lambda a: len(a["data"]) == 4),
    "equal inputs": (
        embed(["the same"] * 5),
        lambda a: all(
            max(map(abs, map(float.__sub__, one["embedding"], a["data"][0]["embedding"]))) < 1e-2 for one in a["data"]
        ),
    ),
    "embeddings: usage": (embed(["a b", "a b"]), lambda a: a["usage"]["prompt_tokens"] == a["usage"]["total_tokens"]),
    "embeddings: base64": (
        embed("text", encoding_format="base64"),
        lambda a: len(b64decode(a["data"][0]["embedding"])) % 4 == 0,
    ),
    "messages": (
        messages(),
        lambda a: a["type"] == "message" and isinstance(a["usage"]["cache_read_input_tokens"], int),
    ),
    "messages: system": (messages(system="Be brief."), lambda a: a["content"]),
    "messages: a stream": (streamed(messages(max_tokens=30)), lambda e: kinds(e) == EVENTS),
    "messages: a count": (count(), lambda a: set(a) == {"input_tokens"} and a["input_tokens"] > 0),
    "messages: a count with system": (count(system="Be brief."), lambda a: a["input_tokens"] > 0),
    "messages: tools": (messages(tools=[TOOL], max_tokens=100), lambda a: a["content"]),
    "messages: a result": (
        messages(messages=[*HELLO, USE, {"role": "user", "content": [RESULT]}]),
        lambda a: a["content"][0]["type"] == "text",
    ),
    "messages: a result and text": (
        messages(messages=[*HELLO, USE, {"role": "user", "content": [{"type": "text", "text": "So:"}, RESULT]}]),
        lambda a: a["content"],
    ),
    "messages: a failed result": (
        messages(messages=[*HELLO, USE, {"role": "user", "content": [{**RESULT, "is_error": True}]}]),
        lambda a: a["type"] == "message",
    ),
    "messages: tools streamed": (
        streamed(
            messages(tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True}, max_tokens=200)
        ),
        lambda e: e[1]["content_block"]["type"] == "tool_use" and e[-1]["type"] == "message_stop",
    ),
    "messages: stop sequences": (
        messages(stop_sequences=["zzz"]),
        lambda a: a["stop_reason"] in ("end_turn", "max_tokens"),
    ),
    "messages: sampling": (messages(temperature=0.5, top_p=0.9, top_k=40), lambda a: a["content"]),
    "messages: thinking": (messages(thinking={"type": "enabled", "budget_tokens": 50}), lambda a: a["content"]),
    "messages: metadata": (messages(metadata={"user_id": "one"}), lambda a: a["content"]),
}
TEXTS = {
    "Unicode": "你好世界 🌍 Ωmega café",
    "emoji": "🎉🚀💻🔥✨🎨🌈",
    "white space": "   \n\t   ",
    "lines": "Line 1\nLine 2\n\nLine 4\n\n\nLine 7",
    "special characters": "<script>alert('x')</script> & \"quotes\"",
    "JSON": 'Parse {"name": "test", "values": [1, 2, 3]}',
    "code": "What does this do?\n```python\ndef foo(x):\n    return x * 2\n```",
}
TURNS = [{"role": role, "content": f"Message {number}"} for number in range(10) for role in ("user", "assistant")]
SGLANG: dict[str, tuple[tuple[str, Json], Holds]] = {
    **{f"messages: {name}": (user(text), lambda a: a["id"]) for name, text in TEXTS.items()},
    "messages: one token": (messages(max_tokens=1), lambda a: a["stop_reason"] in ("max_tokens", "end_turn")),
    "messages: several blocks": (
        user([{"type": "text", "text": text} for text in ("One.", "Two.", "Three.")]),
        lambda a: a["content"],
    ),
    "messages: a long system": (messages(system="You are a helpful assistant. " * 100), lambda a: a["content"]),
    "messages: many turns": (messages(messages=[*TURNS, *HELLO]), lambda a: a["content"]),
    "messages: the same again": (
        messages(messages=[*HELLO, USE, {"role": "user", "content": [RESULT]}, *HELLO]),
        lambda a: a["content"],
    ),
    "messages: system of blocks": (messages(system=[{"type": "text", "text": "Be brief."}]), lambda a: a["content"]),
    "messages: any tool": (
        messages(tools=[TOOL, OTHER], tool_choice={"type": "any", "disable_parallel_tool_use": True}, max_tokens=200),
        lambda a: calls(a) and a["stop_reason"] == "tool_use",
    ),
    "messages: this tool": (
        messages(
            tools=[TOOL, OTHER],
            tool_choice={"type": "tool", "name": "calculate", "disable_parallel_tool_use": True},
            max_tokens=200,
        ),
        lambda a: calls(a)[0]["name"] == "calculate",
    ),
    "messages: auto": (messages(tools=[TOOL], tool_choice={"type": "auto"}), lambda a: a["content"]),
}
WRONG: dict[str, tuple[str, Json]] = {  # their tests want an error too
    "vLLM: 21 top logprobs": chat(logprobs=True, top_logprobs=21),
    "vLLM: 21 top logprobs streamed": streamed(chat(logprobs=True, top_logprobs=21)),
    "vLLM: -1 prompt logprobs": chat(prompt_logprobs=-1),
    "vLLM: 21 logprobs": complete(logprobs=21),
    "vLLM: stream_options without a stream": chat(stream_options={"include_usage": True}),
    "vLLM: null stream_options without a stream": complete(stream_options={"include_usage": None}),
    "vLLM: a regex that is an object": chat(structured_outputs={"regex": {"1": "Python"}}),
    "vLLM: a seed beyond 64 bits": chat(seed=1 << 63),
    "vLLM: a seed below 64 bits": chat(seed=-(1 << 63) - 1),
    "vLLM: no prompt": complete(prompt=None),
    "vLLM: an empty list of prompts": complete(prompt=[]),
    "vLLM: a token outside the vocabulary": complete(prompt=[999_999]),
    "vLLM: a biased token outside the vocabulary": chat(logit_bias={"999999": 1}),
    "vLLM: a body that is a list": (CHAT, []),
    "vLLM: more dimensions than there are": embed("text", dimensions=1 << 20),
    "llama.cpp: response_format sound": chat(response_format={"type": "sound"}),
    "llama.cpp: a schema that is a number": chat(response_format={"type": "json_object", "schema": 123}),
    "llama.cpp: a type that is a number": chat(response_format={"type": "json_object", "schema": {"type": 123}}),
    "llama.cpp: a type that is none": chat(response_format={"type": "json_object", "schema": {"type": "hiccup"}}),
    **{
        f"llama.cpp: messages {json.dumps(wrong)}": chat(messages=wrong)
        for wrong in (None, "string", [123], [{}], [{"role": 123}], [{"role": "system", "content": 123}], [*HELLO, {}])
    },
    "llama.cpp: a prompt that is too long": complete(prompt="I believe the meaning of life is " * 3000),
    "llama.cpp: an empty list to embed": embed([]),
    "llama.cpp: an object to embed": embed({"content": "string"}),
    "llama.cpp: a text to embed that is too long": embed("This is a test " * 5000),
    "llama.cpp: messages without max_tokens": (MESSAGES, {"model": "tiny_chat", "messages": HELLO}),
    "SGLang: messages without any": messages(messages=[]),
    "SGLang: a role that is none": messages(messages=[{"role": "invalid_role", "content": "Hello"}]),
    "SGLang: max_tokens -1": messages(max_tokens=-1),
    "SGLang: a block that is none": user([{"type": "invalid_type", "data": "test"}]),
    "SGLang: a result without its call": user([{"type": "tool_result", "content": "result"}]),
}
OWN_API = "an API of its own: the same is at /v1/completions"
REFUSED: dict[str, tuple[tuple[str, Json], str]] = {  # their tests want an answer
    "vLLM: truncation_side right": (
        complete(truncate_prompt_tokens=2, truncation_side="right"),
        "the end of a prompt is kept",
    ),
    "vLLM: /invocations": (("/invocations", chat()[1]), "a route of SageMaker"),
    "vLLM: min_characters": (chat(min_characters=10), "not a field of any API: unknown fields are named"),
    "vLLM: use_beam_search": (complete(use_beam_search=True, n=2), "there is no beam search"),
    "vLLM: echo of a chat": (chat(echo=True), "the messages are the client's own"),
    "vLLM: a chat template in a request": (
        chat(chat_template="{{ messages }}"),
        "a template is code; it is the operator's",
    ),
    "vLLM: prompt_embeds": (
        complete(prompt_embeds="AAAA"),
        "embeddings are deserialized data, and bypass the tokenizer",
    ),
    "vLLM: structural tags": (chat(structured_outputs={"structural_tag": "{}"}), "tools and reasoning have fields"),
    "llama.cpp: /completion": (("/completion", {"prompt": "a", "n_predict": 8}), OWN_API),
    "llama.cpp: n_predict": (complete(n_predict=8), "max_tokens; the error says so"),
    "llama.cpp: n_probs": (complete(n_probs=10), "logprobs"),
    "llama.cpp: json_schema": (chat(json_schema={"const": "42"}), "response_format; the error says so"),
    "llama.cpp: grammar": (chat(grammar='root ::= "a"'), "structured_outputs.grammar; the error says so"),
    "llama.cpp: timings_per_token": (streamed(chat(timings_per_token=True)), "/metrics, and usage in each chunk"),
    "llama.cpp: cache_prompt": (complete(cache_prompt=False), "every prompt is cached; cache_salt separates"),
    "llama.cpp: response_fields": (complete(response_fields=["content"]), OWN_API),
    "llama.cpp: another model's name": (
        chat(model="gpt-3.5-turbo-instruct"),
        "a wrong name is an error, not another model",
    ),
    "llama.cpp: /apply-template": (
        ("/apply-template", {"messages": HELLO}),
        "/tokenize has its tokens, and /detokenize its text",
    ),
    "llama.cpp: content to tokenize": (("/tokenize", {"content": "text"}), "prompt, as vLLM has it"),
    "llama.cpp: text and tokens in one prompt": (
        complete(prompt=[5, 6, "text"]),
        "the tokens of a text depend on what is before it",
    ),
    "llama.cpp: texts and tokens to embed": (embed(["text", [5, 6]]), "a list is of one kind, as OpenAI has it"),
    "llama.cpp: objects to embed": (embed({"prompt_string": "string"}), "strings and tokens, as OpenAI has it"),
    "llama.cpp: an empty text to embed": (embed(""), "there is no last token"),
    "llama.cpp: pooling mean": (embed("text", pooling="mean"), "cached tokens have no hidden states"),
    "llama.cpp: images": (user([{"type": "image", "source": {"type": "base64"}}]), "the models read text"),
}
MORE: dict[str, tuple[tuple[Any, ...], str]] = {  # their tests want an error, and this server answers
    "SGLang: temperature 2": (messages(temperature=2.0), "the sampler takes up to 100, here as everywhere"),
    "SGLang: an unknown anthropic-beta": (
        (*messages(), {"anthropic-beta": "advanced-tool-use-2025-11-20"}),
        "a header announces fields, and those are checked",
    ),
    "llama.cpp: two messages of the assistant": (
        chat(messages=[*HELLO, *[{"role": "assistant", "content": "a"}] * 2]),
        "templates take them",
    ),
}
PASSING = {
    f"{peer}: {name}": case
    for peer, cases in (("vLLM", VLLM), ("llama.cpp", LLAMA_CPP), ("SGLang", SGLANG))
    for name, case in cases.items()
}
