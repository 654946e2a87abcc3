"""What every scenario talks about: a form and a tool, with bounded fields, so that any model fills them in."""

import asyncio
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

QUESTION = "What is the weather in Oslo?"
CITIES = ("Oslo", "Rome")
run = asyncio.Runner().run  # in one event loop, for the clients that keep their connections


@dataclass(frozen=True, slots=True)
class Server:
    """What a client is configured with."""

    url: str
    key: str
    model: str


class Report(BaseModel):
    """A weather report."""

    model_config = ConfigDict(extra="forbid")  # what a schema does not forbid, a small model adds

    sky: Literal["clear", "cloudy", "rain"]
    degrees: Annotated[int, Field(ge=-40, le=50)]
    windy: bool


def get_weather(city: Literal["Oslo", "Rome"]) -> str:
    """Look up the weather of a city."""
    return f"It is 12 degrees in {city}."


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Look up the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": list(CITIES)}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
