"""/v1/completions."""

from typing import Any

from peers.asking import Asked, Case, Differs, Json, logprobs, one_reason, streamed, usages

OWN_API = "an API of its own: the same is at /v1/completions"


def complete(**fields: Any) -> tuple[str, Json]:
    return "/v1/completions", {"prompt": "Hello, my name is", "max_tokens": 5, "temperature": 0, **fields}


PASSING: dict[str, Case] = {
    "vLLM: a completion": (
        complete(ignore_eos=True),
        lambda a: a["usage"]["completion_tokens"] == 5 and "cached_tokens" in a["usage"]["prompt_tokens_details"],
    ),
    "vLLM: a prompt of ids": (complete(prompt=[5, 5, 5]), lambda a: a["choices"][0]["text"] is not None),
    "vLLM: ids come back": (
        complete(prompt=[5, 6, 7], return_token_ids=True),
        lambda a: a["choices"][0]["prompt_token_ids"] == [5, 6, 7],
    ),
    "vLLM: a truncated prompt": (
        complete(
            prompt=[*range(5, 13)],
            max_tokens=1,
            truncate_prompt_tokens=4,
            truncation_side="left",
            return_token_ids=True,
        ),
        lambda a: a["choices"][0]["prompt_token_ids"] == [9, 10, 11, 12],
    ),
    "vLLM: completions: 0 logprobs": (complete(logprobs=0), lambda a: len(logprobs(a)["top_logprobs"][0]) == 1),
    "vLLM: completions: 5 logprobs": (complete(logprobs=5), lambda a: 5 <= len(logprobs(a)["top_logprobs"][0]) <= 6),
    "vLLM: completions: prompt logprobs": (
        complete(prompt=["A robot", "My name is"], prompt_logprobs=0),
        lambda a: all(choice["prompt_logprobs"] for choice in a["choices"]),
    ),
    "vLLM: completions: a stream": (streamed(complete()), one_reason),
    "vLLM: completions: n": (complete(n=3, temperature=1), lambda a: len(a["choices"]) == 3),
    "vLLM: completions: empty stream_options": (streamed(complete(stream_options={})), lambda c: not any(usages(c))),
    "vLLM: completions: a list of prompts": (
        complete(prompt=["a", "b"]),
        lambda a: [c["index"] for c in a["choices"]] == [0, 1],
    ),
    "vLLM: completions: echo": (complete(echo=True), lambda a: a["choices"][0]["text"].startswith("Hello, my name is")),
    "vLLM: completions: logit_bias": (
        complete(prompt=[5], logit_bias={"300": 100}, return_token_ids=True),
        lambda a: a["choices"][0]["token_ids"] == [300] * 5,
    ),
    "vLLM: completions: allowed tokens": (
        complete(allowed_token_ids=[300, 301], return_token_ids=True),
        lambda a: {*a["choices"][0]["token_ids"]} <= {300, 301},
    ),
    "llama.cpp: completions by the client": (
        complete(max_tokens=8, ignore_eos=True),
        lambda a: a["choices"][0]["finish_reason"] == "length",
    ),
    "llama.cpp: ids, twice": (
        complete(prompt=[[5, 6], [5, 6]]),
        lambda a: a["choices"][0]["text"] == a["choices"][1]["text"],
    ),
    "llama.cpp: stop strings": (complete(stop=["zzz"], max_tokens=20), lambda a: "zzz" not in a["choices"][0]["text"]),
}
WRONG: dict[str, Asked] = {
    "vLLM: 21 logprobs": complete(logprobs=21),
    "vLLM: null stream_options without a stream": complete(stream_options={"include_usage": None}),
    "vLLM: no prompt": complete(prompt=None),
    "vLLM: an empty list of prompts": complete(prompt=[]),
    "vLLM: a token outside the vocabulary": complete(prompt=[999_999]),
    "llama.cpp: a prompt that is too long": complete(prompt="I believe the meaning of life is " * 3000),
}
REFUSED: dict[str, Differs] = {
    "vLLM: truncation_side right": (
        complete(truncate_prompt_tokens=2, truncation_side="right"),
        "the end of a prompt is kept",
    ),
    "vLLM: use_beam_search": (complete(use_beam_search=True, n=2), "there is no beam search"),
    "vLLM: prompt_embeds": (
        complete(prompt_embeds="AAAA"),
        "embeddings are deserialized data, and bypass the tokenizer",
    ),
    "llama.cpp: n_predict": (complete(n_predict=8), "max_tokens; the error says so"),
    "llama.cpp: n_probs": (complete(n_probs=10), "logprobs"),
    "llama.cpp: cache_prompt": (complete(cache_prompt=False), "every prompt is cached; cache_salt separates"),
    "llama.cpp: response_fields": (complete(response_fields=["content"]), OWN_API),
    "llama.cpp: text and tokens in one prompt": (
        complete(prompt=[5, 6, "text"]),
        "the tokens of a text depend on what is before it",
    ),
}
