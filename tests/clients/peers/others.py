"""Embeddings, tokenization, and what only others have."""

from base64 import b64decode
from typing import Any

from peers.asking import HELLO, Asked, Case, Differs, Json, chat


def embed(given: Any, **fields: Any) -> tuple[str, Json]:
    return "/v1/embeddings", {"input": given, **fields}


def length(answer: Json) -> float:
    return float(sum(number * number for number in answer["data"][0]["embedding"]))


PASSING: dict[str, Case] = {
    "vLLM: tokenize and the ids of a chat": (
        ("/tokenize", {"messages": HELLO}),
        lambda a: a["count"] == len(a["tokens"]) > 0,
    ),
    "vLLM: detokenize": (("/detokenize", {"tokens": [300, 301]}), lambda a: a["prompt"]),
    "vLLM: embeddings of ids": (embed([[5, 6], [7]]), lambda a: a["usage"]["prompt_tokens"] == 3),
    "vLLM: embeddings: dimensions": (embed("text", dimensions=8), lambda a: len(a["data"][0]["embedding"]) == 8),
    "llama.cpp: tokenize": (
        ("/tokenize", {"prompt": "What is the capital of France?"}),
        lambda a: len(a["tokens"]) > 5,
    ),
    "llama.cpp: tokenize with pieces": (
        ("/tokenize", {"prompt": "unicode 媽 and emoji 🤗", "return_token_strs": True}),
        lambda a: all(a["token_strs"]) and len(a["token_strs"]) == a["count"],
    ),
    "llama.cpp: an embedding of length 1": (
        embed("I believe the meaning of life is"),
        lambda a: abs(length(a) - 1) < 1e-3,
    ),
    "llama.cpp: embeddings": (embed(["one", "two", "three", "four"]), lambda a: len(a["data"]) == 4),
    "llama.cpp: long embeddings": (embed([f"{letter} " * 256 for letter in "abcd"]), lambda a: len(a["data"]) == 4),
    "llama.cpp: equal inputs": (
        embed(["the same"] * 5),
        lambda a: all(
            max(map(abs, map(float.__sub__, one["embedding"], a["data"][0]["embedding"]))) < 1e-2 for one in a["data"]
        ),
    ),
    "llama.cpp: embeddings: usage": (
        embed(["a b", "a b"]),
        lambda a: a["usage"]["prompt_tokens"] == a["usage"]["total_tokens"],
    ),
    "llama.cpp: embeddings: base64": (
        embed("text", encoding_format="base64"),
        lambda a: len(b64decode(a["data"][0]["embedding"])) % 4 == 0,
    ),
}
WRONG: dict[str, Asked] = {
    "vLLM: more dimensions than there are": embed("text", dimensions=1 << 20),
    "llama.cpp: an empty list to embed": embed([]),
    "llama.cpp: an object to embed": embed({"content": "string"}),
    "llama.cpp: a text to embed that is too long": embed("This is a test " * 5000),
}
REFUSED: dict[str, Differs] = {
    "vLLM: /invocations": (("/invocations", chat()[1]), "a route of SageMaker"),
    "llama.cpp: /completion": (
        ("/completion", {"prompt": "a", "n_predict": 8}),
        "an API of its own: the same is at /v1/completions",
    ),
    "llama.cpp: /apply-template": (
        ("/apply-template", {"messages": HELLO}),
        "/tokenize has its tokens, and /detokenize its text",
    ),
    "llama.cpp: content to tokenize": (("/tokenize", {"content": "text"}), "prompt, as vLLM has it"),
    "llama.cpp: texts and tokens to embed": (embed(["text", [5, 6]]), "a list is of one kind, as OpenAI has it"),
    "llama.cpp: objects to embed": (embed({"prompt_string": "string"}), "strings and tokens, as OpenAI has it"),
    "llama.cpp: an empty text to embed": (embed(""), "there is no last token"),
    "llama.cpp: pooling mean": (embed("text", pooling="mean"), "cached tokens have no hidden states"),
}
