"""What the cases ask, and what they find in an answer."""

from collections.abc import Callable
from typing import Any

Json = Any
Asked = tuple[str, Json] | tuple[str, Json, dict[str, str]]  # a path, a body, and more headers
Case = tuple[Asked, Callable[[Json], object]]  # what is asked, and what must hold of the answer
Differs = tuple[Asked, str]  # and why
CHAT = "/v1/chat/completions"
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1+1?"}]
HELLO = [{"role": "user", "content": "Hello"}]
CALCULATE = {
    "type": "object",
    "properties": {"sum": {"enum": ["2+2", "3*3"]}},
    "required": ["sum"],
    "additionalProperties": False,
}


def chat(**fields: Any) -> tuple[str, Json]:
    return CHAT, {"messages": ASKED, "max_completion_tokens": 5, "temperature": 0, **fields}


def streamed(asked: tuple[str, Json], **options: Any) -> tuple[str, Json]:
    return asked[0], {**asked[1], "stream": True, **({"stream_options": options} if options else {})}


def logprobs(answer: Json) -> Any:
    return answer["choices"][0]["logprobs"]


def one_reason(chunks: list[Json]) -> bool:
    return sum(bool(c["choices"] and c["choices"][0]["finish_reason"]) for c in chunks) == 1


def usages(chunks: list[Json]) -> list[Any]:
    return [chunk.get("usage") for chunk in chunks]
