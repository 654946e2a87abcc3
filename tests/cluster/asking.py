"""How tests ask."""

from typing import Any

import openai

LONG = "Explain, with all details, how a serving engine keeps many requests going. " * 6


def ask(client: openai.OpenAI, question: str, **options: Any) -> str:
    options = {"temperature": 0, "max_tokens": 24} | options
    message = {"role": "user", "content": question}
    answer = client.chat.completions.create(model="tiny_chat", messages=[message], **options)
    return str(answer.choices[0].message.content)


def stream(client: openai.OpenAI, question: str, tokens: int) -> "openai.Stream[Any]":
    """It never ends by itself."""
    return client.completions.create(
        model="tiny_chat",
        prompt=question,
        max_tokens=tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
