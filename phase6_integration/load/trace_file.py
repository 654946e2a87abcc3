"""Read a trace from a file: requests as Mooncake publishes them, or conversations as ShareGPT's are.

Mooncake: {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]} a line, the time in
milliseconds; an id names the content of 512 tokens, so prompts share prefixes as in the trace. ShareGPT:
{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}, ...]}, or {"messages": [{"role":
"user", "content": "..."}, ...]}, in a list or a line each. The answers say how long the server's are to be.
"""

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from phase6_integration.load.session import Session, Turn, tokens

BLOCK = 512  # tokens
CHARACTERS = 4  # of a token, about: how long an answer of a file is
QUESTIONS, ANSWERS = ("human", "user"), ("gpt", "assistant", "chatgpt", "bard", "bing")
EXAMPLE = '{"timestamp": 0, "input_length": 600, "output_length": 52, "hash_ids": [1, 2]} or {"conversations": [...]}'


def read(path: str, rng: random.Random) -> Iterator[Session]:
    """The sessions of a file, in its order. A conversation without a question and an answer is left out, as in vLLM."""
    salt, found = rng.getrandbits(64), 0

    @lru_cache(maxsize=1024)
    def block(content: object) -> Sequence[int]:
        return tokens(random.Random(f"{salt} {content}"), BLOCK)

    for number, entry in _entries(path):
        try:
            if "input_length" in entry:
                session = _request(entry, [token for id in entry.get("hash_ids", ()) for token in block(id)], rng)
            else:
                session = Session(None, _turns(entry))
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ValueError(f"{path}, entry {number}: not such as {EXAMPLE}: {json.dumps(entry):.80}") from None
        if session.turns:
            found += 1
            yield session
    if not found:
        raise ValueError(f"{path} has no request")


def _entries(path: str) -> Iterator[tuple[int, Any]]:
    """The entries of a JSON list, or one per line."""
    number = 0
    with Path(path).open(encoding="utf-8") as file:
        try:
            if file.read(64).lstrip().startswith("["):
                file.seek(0)
                yield from enumerate(json.load(file), 1)
                return
            file.seek(0)
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            at = f", see line {number}" if number else ""
            raise ValueError(f"{path} is neither a JSON list nor JSON by the line{at}: {error}") from None


def _request(entry: Mapping[str, Any], shared: list[int], rng: random.Random) -> Session:
    """A request of Mooncake's. The tokens that its blocks do not cover are its own."""
    length, answer, time = entry["input_length"], entry["output_length"], entry.get("timestamp")
    if min(length, answer) < 1 or not isinstance(length + answer, int) or not 0 <= (time or 0) < math.inf:
        raise ValueError
    prompt = shared[:length] + tokens(rng, max(length - len(shared), 0))
    return Session(None if time is None else time / 1000, [Turn(prompt, answer)])


def _turns(entry: Mapping[str, Any]) -> list[Turn]:
    """Each question that has an answer."""
    said = entry["conversations"] if "conversations" in entry else entry["messages"]
    lines = [(line.get("from") or line["role"], line.get("value") or line.get("content") or "") for line in said]
    if not all(isinstance(text, str) for _, text in lines):
        raise ValueError
    return [
        Turn(question, max(-(-len(answer) // CHARACTERS), 1))
        for (asks, question), (answers, answer) in pairwise(lines)
        if asks in QUESTIONS and answers in ANSWERS and question
    ]
