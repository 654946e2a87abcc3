"""Pydantic AI: agents with text, tools and typed outputs, over the chat endpoint and over the Responses endpoint."""

import contextlib

import pytest
from pydantic_ai import (
    Agent,
    NativeOutput,
    PromptedOutput,
    ToolOutput,
    UnexpectedModelBehavior,
    capture_run_messages,
)
from pydantic_ai.messages import ModelMessagesTypeAdapter, ModelResponse, ToolReturnPart
from pydantic_ai.models import Model
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from subject import QUESTION, Report, Server, get_weather, run

GREEDY = {"temperature": 0, "max_tokens": 128, "parallel_tool_calls": False}


@pytest.fixture(params=[OpenAIChatModel, OpenAIResponsesModel], ids=["chat", "responses"])
def model(request: pytest.FixtureRequest, server: Server) -> Model:
    return request.param(server.model, provider=OpenAIProvider(base_url=server.url, api_key=server.key))


@pytest.fixture
def agent(model: Model) -> Agent:
    return Agent(model, instructions="Be brief.", model_settings=GREEDY)


def test_run(agent: Agent) -> None:
    result = agent.run_sync(QUESTION)
    assert result.output
    assert 0 < result.usage.output_tokens <= 128
    assert result.response.model_name == "tiny_chat"


def test_run_streamed(agent: Agent) -> None:
    async def answer() -> str:
        async with agent.run_stream(QUESTION) as result:
            return "".join([delta async for delta in result.stream_text(delta=True, debounce_by=None)])

    assert run(answer()) == agent.run_sync(QUESTION).output


def test_history_goes_back_after_json(agent: Agent) -> None:
    first = agent.run_sync(QUESTION)
    history = ModelMessagesTypeAdapter.validate_json(first.all_messages_json())
    second = agent.run_sync("And in Rome?", message_history=history)
    assert second.output
    assert len(second.all_messages()) == 4


@pytest.mark.parametrize("output", [ToolOutput, NativeOutput], ids=["tool", "native"])
def test_output_is_typed(agent: Agent, output: type) -> None:
    async def streamed() -> Report:
        async with agent.run_stream(QUESTION, output_type=output(Report)) as result:
            return await result.get_output()

    assert isinstance(agent.run_sync(QUESTION, output_type=output(Report)).output, Report)
    assert isinstance(run(streamed()), Report)


def test_prompted_output_is_a_json_object(agent: Agent) -> None:
    """The schema is in the prompt alone: the model answers with an object, and need not follow the schema."""
    with capture_run_messages() as messages, contextlib.suppress(UnexpectedModelBehavior):
        agent.run_sync(QUESTION, output_type=PromptedOutput(Report), retries=0)
    answers = [message for message in messages if isinstance(message, ModelResponse)]
    assert all(answer.text.lstrip().startswith("{") for answer in answers)
    assert answers


def test_tools_are_called_and_their_results_go_back(model: Model) -> None:
    """With a typed output a call is required: of the tool, or of the one that is the output."""
    agent = Agent(model, output_type=ToolOutput(Report), model_settings={**GREEDY, "temperature": 1}, retries=3)
    agent.tool_plain(get_weather)
    called = 0
    for seed in range(12):
        result = agent.run_sync(QUESTION, model_settings={"seed": seed})
        assert isinstance(result.output, Report)
        parts = [part for message in result.all_messages() for part in message.parts]
        called += any(isinstance(part, ToolReturnPart) and part.tool_name == "get_weather" for part in parts)
    assert called
