"""`nanoserve generate`: complete prompts from the command line, a file or a pipe. Prints text or JSON lines."""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from phase0_request.params import SamplingParams
from phase0_request.support.flags import Parser
from phase5_continuous.extras.record.record_file import recording
from phase6_integration.cli.common import SAMPLING, add_sampling, printable
from phase6_integration.cli.local_model import add_local_model, local_model, open_engine
from phase6_integration.cli.terminal import Wrapping
from phase6_integration.engine.options import EngineOptions

DEFAULTS = {"max_tokens": 128, "temperature": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The answer to one prompt, or the error."""

    prompt: str
    text: str
    finish_reason: str | None
    prompt_tokens: int
    output_tokens: int
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
        "--record", type=Path, metavar="FILE", help="what the engine does in each step, for nanoserve replay (none)"
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="a directory, a GGUF file, a short name such as smollm2, or a name on the hub (tiny_chat)",
    )
    sampling = parser.add_argument_group("sampling")
    add_sampling(sampling, list(SAMPLING), **DEFAULTS)
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="end the answer before it; repeatable (none)")
    add_local_model(parser.add_argument_group("model"))


def run(given: argparse.Namespace, parser: Parser) -> int:
    """0 if every prompt was answered, 1 if not."""
    options = vars(given)
    sampling = DEFAULTS | {name: options[name] for name in (*SAMPLING, "stop") if name in options}
    try:
        params = SamplingParams(**sampling)
        model = local_model(options)
        prompts = read_prompts(options.get("prompts", []), options.get("file"))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    try:
        results = complete(model, prompts, options["chat"], params, options.get("record"))
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    for result in results:
        if not (result.text or result.error or options["json"]):
            print(f"{parser.prog}: the model ended its answer at once, without any text", file=sys.stderr)
            continue
        text = json.dumps(asdict(result)) if options["json"] else result.shown(alone=len(results) == 1)
        narrow = sys.stdout.isatty() and not options["json"]
        out = Wrapping(sys.stdout, shutil.get_terminal_size().columns if narrow else sys.maxsize)
        out.write(f"{text}\n")
        out.end()
    return 1 if any(result.error for result in results) else 0


def read_prompts(prompts: list[str], file: str | None) -> list[str]:
    """The prompts given as arguments, or the lines of the file or the pipe. ValueError without any."""
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


def complete(
    options: EngineOptions, prompts: Sequence[str], chat: bool, params: SamplingParams, record: Path | None = None
) -> list[Result]:
    """Run all prompts in one batch, and record it if a file is given."""
    with open_engine(options) as engine:
        tokenizer = engine.parts.model.tokenizer
        assert tokenizer is not None
        tokens = [
            tokenizer.chat([{"role": "user", "content": prompt}]) if chat else tokenizer.encode(prompt)
            for prompt in prompts
        ]
        with recording(engine.parts.core, record, tokenizer.label, Path(options.model).name):
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
