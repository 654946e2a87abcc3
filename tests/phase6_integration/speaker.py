"""A server with an engine that says what a test gives it, and models of other families: their templates and tokens."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import OpenAI
from tokenizers import Tokenizer as HFTokenizer

from phase0_request.request import FinishReason, Request
from phase0_request.tokenizer import BUNDLED
from phase6_integration.api.settings import ServerSettings
from tests.phase0_request.families import special
from tests.phase6_integration.fake_engine import FakeEngine, served


@dataclass
class Speaker:
    """`text` is what the next answers say; their requests are in `engine.submitted`."""

    client: OpenAI
    url: str
    engine: FakeEngine
    text: str = ""

    @property
    def prompt(self) -> str:
        """The last prompt, with the names of control tokens."""
        assert self.engine.tokenizer is not None
        return self.engine.tokenizer.decode(self.engine.submitted[-1].prompt_tokens, skip_special_tokens=False)


@contextmanager
def speaking(settings: ServerSettings | None = None, **options: Any) -> Iterator[Speaker]:
    def script(_: Request) -> list[int | FinishReason]:
        tokenizer = engine.tokenizer
        assert tokenizer is not None
        return [*tokenizer.encode(speaker.text, add_special_tokens=False), min(tokenizer.eos_ids)]

    engine = FakeEngine(script, **options)
    with (
        served(lambda: engine, settings or ServerSettings()) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client,
    ):
        speaker = Speaker(client, url, engine)
        yield speaker


def model_of(directory: Path, template: str, control: tuple[str, ...] = ()) -> str:
    """A model directory with the bundled vocabulary, this template and more control tokens."""
    for name in ("tokenizer_config.json", "generation_config.json"):
        shutil.copy(BUNDLED / name, directory)
    backend = HFTokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    backend.add_special_tokens(special(*control))
    backend.save(str(directory / "tokenizer.json"))
    config = json.loads((BUNDLED / "config.json").read_text())
    config["vocab_size"] += len(control)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(template)
    return str(directory)
