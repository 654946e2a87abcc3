"""OpenAI's Agents SDK, over the Responses endpoint, which is its default, and over the chat endpoint."""

from typing import Any

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI
from subject import QUESTION, Report, Server, get_weather, run

WEATHER = function_tool(get_weather)
MODELS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


@pytest.fixture(params=MODELS)
def options(request: pytest.FixtureRequest, server: Server) -> dict[str, Any]:
    client = AsyncOpenAI(base_url=server.url, api_key=server.key, max_retries=0)
    model = MODELS[request.param](model=server.model, openai_client=client)
    return {"name": "assistant", "instructions": "Be brief.", "model": model}


def greedy(**settings: Any) -> ModelSettings:
    return ModelSettings(**{"temperature": 0, "max_tokens": 128, **settings})


def calling(**settings: Any) -> ModelSettings:
    """A small model does not stop to call: one call an answer."""
    return greedy(parallel_tool_calls=False, **settings)


def test_run(options: dict[str, Any]) -> None:
    result = Runner.run_sync(Agent(**options, model_settings=greedy()), QUESTION)
    assert result.final_output
    assert result.context_wrapper.usage.output_tokens > 0


def test_run_streamed(options: dict[str, Any]) -> None:
    async def answer() -> tuple[str, str]:
        result = Runner.run_streamed(Agent(**options, model_settings=greedy(include_usage=True)), QUESTION)
        events = [event async for event in result.stream_events() if event.type == "raw_response_event"]
        deltas = [event.data.delta for event in events if event.data.type == "response.output_text.delta"]
        return "".join(deltas), result.final_output

    deltas, output = run(answer())
    assert deltas == output != ""


def test_conversation_goes_on_with_its_answers(options: dict[str, Any]) -> None:
    agent = Agent(**options, model_settings=greedy())
    history = Runner.run_sync(agent, QUESTION).to_input_list()
    assert Runner.run_sync(agent, [*history, {"role": "user", "content": "And in Rome?"}]).final_output


@pytest.mark.parametrize("streamed", [False, True])
def test_output_type(options: dict[str, Any], streamed: bool) -> None:
    agent = Agent(**options, model_settings=greedy(), output_type=Report)

    async def answer() -> Any:
        if not streamed:
            return (await Runner.run(agent, QUESTION)).final_output
        result = Runner.run_streamed(agent, QUESTION)
        async for _ in result.stream_events():
            pass
        return result.final_output

    assert isinstance(run(answer()), Report)


@pytest.mark.parametrize("choice", ["required", "get_weather"])
def test_tool_is_called_and_the_answer_follows(options: dict[str, Any], choice: str) -> None:
    """After the first call the SDK leaves the choice to the model."""
    agent = Agent(**options, model_settings=calling(tool_choice=choice), tools=[WEATHER])
    result = Runner.run_sync(agent, QUESTION)
    outputs = [item.output for item in result.new_items if item.type == "tool_call_output_item"]
    assert outputs
    assert all("12 degrees" in output for output in outputs)
    assert result.final_output


def test_tool_is_called_streamed(options: dict[str, Any]) -> None:
    async def answer() -> list[str]:
        agent = Agent(**options, model_settings=calling(tool_choice="required"), tools=[WEATHER])
        result = Runner.run_streamed(agent, QUESTION)
        return [event.name async for event in result.stream_events() if event.type == "run_item_stream_event"]

    names = run(answer())
    assert names[0] == "tool_called"
    assert "tool_output" in names
    assert names[-1] == "message_output_created"
