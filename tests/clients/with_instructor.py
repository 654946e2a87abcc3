"""instructor: a typed answer in each mode that OpenAI's API has, whole, partial and as a list."""

from typing import Any

import instructor
import pytest
from instructor import Mode
from instructor.core import IncompleteOutputException, InstructorRetryException
from openai import OpenAI
from subject import QUESTION, Report, Server

ASKED: Any = [{"role": "user", "content": QUESTION}]
GREEDY: Any = {"model": "tiny_chat", "temperature": 0, "max_tokens": 128, "max_retries": 0, "messages": ASKED}
SCHEMA = [Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA]


@pytest.fixture
def plain(server: Server) -> OpenAI:
    return OpenAI(base_url=server.url, api_key=server.key, max_retries=0)


@pytest.mark.parametrize("mode", SCHEMA, ids=lambda mode: mode.name)
def test_create(plain: OpenAI, mode: Mode) -> None:
    assert isinstance(instructor.from_openai(plain, mode=mode).create(response_model=Report, **GREEDY), Report)


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.JSON_SCHEMA], ids=lambda mode: mode.name)
def test_create_partial(plain: OpenAI, mode: Mode) -> None:
    *_, last = instructor.from_openai(plain, mode=mode).create_partial(response_model=Report, **GREEDY)
    assert Report.model_validate(last.model_dump())


def test_json_mode_asks_for_an_object(plain: OpenAI) -> None:
    """Any object: the schema is in the prompt alone, and a small model may not come to an end."""
    with pytest.raises((InstructorRetryException, IncompleteOutputException)) as refused:
        instructor.from_openai(plain, mode=Mode.JSON).create(response_model=Report, **GREEDY)
    (choice,) = refused.value.last_completion.choices
    assert choice.message.content.lstrip().startswith("{")


def test_responses_with_tools(plain: OpenAI) -> None:
    client = instructor.from_openai(plain, mode=Mode.RESPONSES_TOOLS)
    found = client.responses.create(input=QUESTION, model="tiny_chat", temperature=0, response_model=Report)
    assert isinstance(found, Report)
