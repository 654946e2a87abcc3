"""Many prompts at once, by an engine of our own or by a server, and what came of each."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress

from phase0_request.params import SamplingParams
from phase2_prefill_decode.config import ModelConfig
from phase2_prefill_decode.threads import threads_for
from phase6_integration.cli.chat import HARMLESS
from phase6_integration.http_client import LostError, Pool, Target, Whole, first_model
from phase6_integration.hub import directory_of
from phase6_integration.options import EngineOptions

AT_ONCE = 32  # requests to a server


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What came of one prompt: a text and why it ended, or an error."""

    prompt: str
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None  # of the prompt; None where it is not told
    error: str | None = None

    def line(self) -> str:
        """As JSON."""
        return msgspec.json.encode(self).decode()

    def words(self, alone: bool) -> str:
        """For people: the answer, after its prompt if there are several."""
        shown = f"error: {self.error}" if self.error else self.text
        return (shown if alone else f"> {self.prompt}\n{shown.strip()}\n").translate(HARMLESS)


def here(options: EngineOptions, prompts: Sequence[str], chat: bool, params: SamplingParams) -> list[Generated]:
    """By an engine of this process, all of them at once."""
    from phase6_integration.engine import NanoServingEngine

    directory = directory_of(options.model)
    threads = options.threads or threads_for(ModelConfig.from_pretrained(directory))
    with NanoServingEngine.from_pretrained(**asdict(replace(options, model=str(directory), threads=threads))) as engine:
        tokenizer = engine.parts.model.tokenizer
        if tokenizer is None:
            raise ValueError("this model has no tokenizer.json, so it takes no text")
        asked = [
            tokenizer.chat([{"role": "user", "content": prompt}]) if chat else tokenizer.encode(prompt)
            for prompt in prompts
        ]
        done = engine.generate(asked, params)
    return [
        Generated(
            prompt=prompt,
            text=one.text,
            finish_reason=one.finish_reason.value if one.finish_reason else None,
            prompt_tokens=len(one.request.prompt_tokens),
            output_tokens=len(one.output_tokens),
            error=one.request.error,
        )
        for prompt, one in zip(prompts, done, strict=True)
    ]


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details | None = None


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    message: _Message | None = None
    finish_reason: str | None = None


class _Error(msgspec.Struct):
    message: str = "no reason given"


class _Answer(msgspec.Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: _Error | None = None


def there(
    target: Target, model: str | None, prompts: Sequence[str], chat: bool, asked: dict[str, Any]
) -> list[Generated]:
    """By a server, some at a time. What fails for one prompt is that prompt's error."""

    async def play() -> list[Generated]:
        pool, places = Pool(target, time.perf_counter), asyncio.Semaphore(AT_ONCE)
        name = model or await first_model(pool)
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("generating", total=len(prompts))

            async def one(prompt: str) -> Generated:
                async with places:
                    generated = await ask(pool, prompt, chat, {"model": name, **asked})
                bar.advance(task)
                return generated

            try:
                return await asyncio.gather(*map(one, prompts))
            finally:
                pool.close()

    return asyncio.run(play())


async def ask(pool: Pool, prompt: str, chat: bool, fields: dict[str, Any]) -> Generated:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    what = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    whole = Whole()
    try:
        await pool.exchange(pool.target.request("POST", path, msgspec.json.encode(what | fields)), whole)
        answer = msgspec.json.decode(whole.body, type=_Answer)
    except LostError as error:
        return Generated(prompt=prompt, error=str(error))
    except msgspec.DecodeError:
        return Generated(prompt=prompt, error=f"the server answered {whole.status} with something that is no answer")
    if answer.error is not None or not answer.choices:
        message = answer.error.message if answer.error else "no choice"
        return Generated(prompt=prompt, error=f"{whole.status}: {message}")
    choice, usage = answer.choices[0], answer.usage
    text = choice.message.content if choice.message else choice.text
    cached = usage.prompt_tokens_details if usage else None
    return Generated(
        prompt=prompt,
        text=text or "",
        finish_reason=choice.finish_reason,
        prompt_tokens=usage.prompt_tokens if usage else None,
        output_tokens=usage.completion_tokens if usage else None,
        cached_tokens=cached.cached_tokens if cached else None,
    )
