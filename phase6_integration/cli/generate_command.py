"""`nanoserve generate`: complete prompts from the command line, a file or a pipe. Prints text or JSON lines."""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from phase0_request.params import SamplingParams
from phase6_integration.cli.common import (
    SAMPLING,
    add_local_model,
    add_sampling,
    add_server,
    http_error,
    http_settings,
    local_options,
    open_engine,
    printable,
)
from phase6_integration.engine.flags import Parser
from phase6_integration.engine.options import EngineOptions
from phase6_integration.load.client import first_model

MAX_CONNECTIONS = 32  # requests to a server at once
DEFAULTS = {"max_tokens": 128, "temperature": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The answer to one prompt, or the error."""

    prompt: str
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None  # of the prompt; None if unknown
    error: str | None = None

    def shown(self, alone: bool) -> str:
        """For a terminal: the answer, after its prompt if there are several."""
        text = f"error: {self.error}" if self.error else self.text
        return printable(text if alone else f"> {self.prompt}\n{text.strip()}\n")


def add_flags(parser: Parser) -> None:
    parser.usage = "nanoserve generate [PROMPT ...] [flags]"
    parser.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="what is continued (each line of the standard input)"
    )
    parser.add_argument("--file", metavar="FILE", help="with a prompt on each line; - is the standard input (none)")
    parser.add_argument("--chat", action="store_true", default=False, help="send each prompt as a chat message (off)")
    parser.add_argument("--json", action="store_true", default=False, help="print a line of JSON for each prompt (off)")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="a directory, a name on the hub, or with --url its name there (tiny_chat, or the first of the server)",
    )
    sampling = parser.add_argument_group("sampling")
    add_sampling(sampling, list(SAMPLING), **DEFAULTS)
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="end the answer before it; repeatable (none)")
    add_local_model(parser.add_argument_group("local model"))
    add_server(parser.add_argument_group("server"))


def run(given: argparse.Namespace, parser: Parser) -> int:
    """0 if every prompt was answered, 1 if not."""
    options = vars(given)
    sampling = DEFAULTS | {name: options[name] for name in (*SAMPLING, "stop") if name in options}
    try:
        params = SamplingParams(**sampling)
        local = local_options(options)
        settings = http_settings(options) if local is None else {}
        prompts = read_prompts(options.get("prompts", []), options.get("file"))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    try:
        if local is not None:
            results = complete_here(local, prompts, options["chat"], params)
        else:
            results = asyncio.run(complete_there(settings, prompts, options["chat"], options.get("model"), sampling))
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except httpx.TransportError as error:
        print(f"{parser.prog}: {http_error(error, options['url'])}", file=sys.stderr)
        return 1
    for result in results:
        print(json.dumps(asdict(result)) if options["json"] else result.shown(alone=len(results) == 1))
    return 1 if any(result.error for result in results) else 0


def read_prompts(prompts: list[str], file: str | None) -> list[str]:
    """The prompts given as arguments, or the lines of the file or the pipe. ValueError if there is none."""
    if prompts and file is not None:
        raise ValueError("give prompts or --file, not both")
    if not prompts:
        if file is None and sys.stdin.isatty():
            raise ValueError("no prompt: give one, or --file, or pipe some in")
        text = sys.stdin.read() if file in (None, "-") else Path(file).read_text("utf-8")
        prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts or not all(prompts):
        raise ValueError("a prompt is empty" if prompts else "no prompt: there is no line with text in it")
    return prompts


def complete_here(options: EngineOptions, prompts: Sequence[str], chat: bool, params: SamplingParams) -> list[Result]:
    """Run all prompts in one batch on a local engine."""
    with open_engine(options) as engine:
        tokenizer = engine.parts.model.tokenizer
        assert tokenizer is not None
        tokens = [
            tokenizer.chat([{"role": "user", "content": prompt}]) if chat else tokenizer.encode(prompt)
            for prompt in prompts
        ]
        completions = engine.generate(tokens, params)
    return [
        Result(
            prompt=prompt,
            text=completion.text,
            finish_reason=completion.finish_reason.value if completion.finish_reason else None,
            prompt_tokens=len(completion.request.prompt_tokens),
            output_tokens=len(completion.output_tokens),
            error=completion.request.error,
        )
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


async def complete_there(
    settings: dict[str, Any], prompts: Sequence[str], chat: bool, model: str | None, sampling: dict[str, Any]
) -> list[Result]:
    """Send all prompts to a server, at most MAX_CONNECTIONS at once. A prompt that fails has an error as its result."""
    limits = httpx.Limits(max_connections=MAX_CONNECTIONS)
    async with httpx.AsyncClient(limits=limits, **settings) as client:
        model = model or first_model(await client.get("/v1/models"))
        fields = {"model": model, **sampling}
        return await asyncio.gather(*(_complete(client, prompt, chat, fields) for prompt in prompts))


async def _complete(client: httpx.AsyncClient, prompt: str, chat: bool, fields: dict[str, Any]) -> Result:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    try:
        response = await client.post(path, json=asked | fields)
        content = response.json()
        if response.status_code != 200:
            return Result(prompt=prompt, error=f"{response.status_code}: {content['error']['message']}")
        choice, usage = content["choices"][0], content.get("usage") or {}
        return Result(
            prompt=prompt,
            text=(choice["message"]["content"] if chat else choice["text"]) or "",
            finish_reason=choice.get("finish_reason"),
            prompt_tokens=usage.get("prompt_tokens"),
            output_tokens=usage.get("completion_tokens"),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        )
    except httpx.TransportError as error:
        return Result(prompt=prompt, error=http_error(error, str(client.base_url)))
    except (ValueError, LookupError, TypeError):
        return Result(prompt=prompt, error=f"the server answered {response.status_code} without a completion")
