"""The types that people give to fields of pydantic models: what a schema of each is held to, and what only noted.

The oracle of an answer is pydantic itself, which reads what the bundled model writes at a high temperature.
"""

import asyncio
import json
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Network
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar
from uuid import UUID

import httpx2
import pytest
from llguidance import LLMatcher
from pydantic import (
    UUID1,
    UUID3,
    UUID4,
    UUID5,
    AwareDatetime,
    Base64Bytes,
    BaseModel,
    Field,
    FilePath,
    HttpUrl,
    IPvAnyAddress,
    Json,
    NaiveDatetime,
    NonNegativeFloat,
    PastDate,
    PositiveInt,
    PostgresDsn,
    RedisDsn,
    SecretStr,
    create_model,
)
from typing_extensions import TypedDict

import chapters
from phase6_integration.api.settings import ServerSettings
from phase6_integration.process.async_engine import AsyncEngine
from tests.phase6_integration.fake_engine import client
from tests.phase6_integration.posting import CHAT
from tests.phase6_integration.real_engine import OnTheEngine, shared

ANSWERS = 6


class Color(Enum):
    RED = "red"
    BLUE = "dark blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class City(BaseModel):
    name: Annotated[str, Field(max_length=9)]
    size: int


class Tree(BaseModel):
    size: int
    parts: "list[Tree]" = Field([], max_length=2)


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    good: bool


T = TypeVar("T")


class Box(BaseModel, Generic[T]):
    item: T


@dataclass
class Point:
    x: int
    y: int


class Movie(TypedDict):
    seen: bool
    year: int


class Pair(NamedTuple):
    left: int
    right: bool


Key = Annotated[str, Field(pattern="^[a-z]{1,4}$")]
ENFORCED: dict[str, Any] = {
    "str": Annotated[str, Field(max_length=9)],
    "int": int,
    "float": NonNegativeFloat,
    "bool": bool,
    "Optional": int | None,
    "Literal": Literal["a", 1, True],
    "Enum": Color,
    "IntEnum": Level,
    "list": list[int],
    "tuple": tuple[int, bool],
    "deque": deque[int],
    "dict[str, int]": Annotated[dict[Key, int], Field(max_length=2)],
    "dict[Enum, int]": Annotated[dict[Color, int], Field(max_length=2)],
    "dict[date, int]": Annotated[dict[date, int], Field(max_length=2)],
    "datetime": datetime,
    "date": date,
    "time": time,
    "timedelta": timedelta,
    "AwareDatetime": AwareDatetime,
    "UUID": UUID,
    "UUID1": UUID1,
    "UUID3": UUID3,
    "UUID4": UUID4,
    "UUID5": UUID5,
    "Decimal": Annotated[Decimal, Field(ge=0, le=9)],
    "Base64Bytes": Base64Bytes,
    "IPv4Address": IPv4Address,
    "IPv6Address": IPv6Address,
    "model": City,
    "recursive": Tree,
    "discriminated": Annotated[Cat | Dog, Field(discriminator="kind")],
    "generic": Box[int],
    "dataclass": Point,
    "TypedDict": Movie,
    "NamedTuple": Pair,
    "PositiveInt": PositiveInt,
    "pattern": Annotated[str, Field(pattern=r"^[A-Z]{3}-\d{4}$")],
    "bounds": Annotated[int, Field(ge=0, lt=99)],
    "multiple_of": Annotated[int, Field(multiple_of=5)],
    "Any": Any,
}
NOTED: dict[str, tuple[Any, str]] = {
    "set": (set[int], "uniqueItems"),
    "frozenset": (frozenset[int], "uniqueItems"),
    "bytes": (bytes, "format binary"),
    "Path": (Path, "format path"),
    "FilePath": (FilePath, "format file-path"),
    "PostgresDsn": (PostgresDsn, "format multi-host-uri"),
    "IPv4Network": (IPv4Network, "format ipv4network"),
    "IPv6Network": (IPv6Network, "format ipv6network"),
    "IPv4Interface": (IPv4Interface, "format ipv4interface"),
    "IPvAnyAddress": (IPvAnyAddress, "format ipvanyaddress"),
    "SecretStr": (SecretStr, "format password"),
    "re.Pattern": (re.Pattern, "format regex"),
    "Json": (Json, "contentMediaType, contentSchema"),
}
# Of these a schema says less than the type: any URI, any date. That is enforced.
VAGUE: dict[str, Any] = {"HttpUrl": HttpUrl, "RedisDsn": RedisDsn, "PastDate": PastDate, "NaiveDatetime": NaiveDatetime}


@pytest.fixture(scope="module")
def on_the_engine() -> Iterator[OnTheEngine]:
    with shared() as run:
        yield run


KINDS = {**ENFORCED, **{name: kind for name, (kind, _) in NOTED.items()}, **VAGUE}


def schema_of(name: str) -> str:
    return json.dumps(create_model("Model", value=(KINDS[name], ...)).model_json_schema())


def test_the_chapter_has_how_many_types_are_accepted() -> None:
    grammars = [LLMatcher.grammar_from_json_schema(schema_of(name)) for name in KINDS]
    refused = sum(bool(LLMatcher.validate_grammar(grammar)) for grammar in grammars)
    table = f"""\
| of {len(KINDS)} types | accepted | with a note | refused |
|---|---|---|---|
| by llguidance | {len(KINDS) - refused} | | {refused} |
| rewritten | {len(KINDS) - len(NOTED)} | {len(NOTED)} | |
"""
    assert table in (Path(chapters.__file__).parent / "08_constrained.md").read_text("utf-8")


@pytest.mark.parametrize("group", range(6))
def test_answers_validate_and_what_is_not_enforced_is_noted(group: int, on_the_engine: OnTheEngine) -> None:
    models = {name: create_model("Model", value=(KINDS[name], ...)) for name in [*KINDS][group::6]}
    judged: list[str] = []

    async def check(http: httpx2.AsyncClient, name: str, model: type[BaseModel]) -> None:
        response = await http.post(CHAT, json=body(model))
        assert response.status_code == 200, (name, response.text)
        noted = f'299 - "not enforced: {NOTED[name][1]}"' if name in NOTED else None
        choices = response.json()["choices"]
        said = [text for text in response.headers.get_list("warning") if "cut at its length" not in text]
        assert said == ([] if noted is None else [noted]), name
        is_cut = any(choice["finish_reason"] == "length" for choice in choices)
        assert is_cut == ("cut at its length" in response.headers.get("warning", "")), name
        for choice in choices:
            if choice["finish_reason"] == "stop":
                value = json.loads(choice["message"]["content"])
                judged.append(name)
                if name in ENFORCED:
                    model.model_validate_json(json.dumps(value))

    async def ask(engine: AsyncEngine) -> None:
        async with client(engine, ServerSettings()) as http:
            await asyncio.gather(*(check(http, *one) for one in models.items()))

    on_the_engine(ask)
    assert len(judged) > 20


def body(model: type[BaseModel]) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "A value, please."}],
        "structured_outputs": {"json": model.model_json_schema(), "disable_additional_properties": True},
        "n": ANSWERS,
        "max_tokens": 64,
        "seed": 0,
        "temperature": 1.5,
    }
