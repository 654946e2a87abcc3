from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from phase0_request.tokenizer import Tokenizer
from tests.phase6_integration import forked_tokenizers
from tests.phase6_integration.real_engine import GREEDY, PROMPTS


@pytest.fixture(scope="session")
def offline() -> list[list[int]]:
    """What the engine in this process answers."""
    from phase6_integration.engine.engine import (
        NanoServingEngine,  # torch: not before the environment it looks at is set
    )

    with NanoServingEngine.from_pretrained(kv_cache_pages=256) as made:
        return [completion.output_tokens for completion in made.generate(PROMPTS, GREEDY)]


@pytest.fixture
def one_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of one model share its tokenizer, which takes a fifth of a second to load."""
    monkeypatch.setattr(Tokenizer, "from_pretrained", _loaded)


_loaded = cache(Tokenizer.from_pretrained)


@pytest.fixture(scope="session", autouse=True)
def shared_tokenizer_processes() -> Iterator[None]:
    """Apps of one model and one template share their tokenizer processes, and these their imports: to start one takes
    most of a second."""
    from phase6_integration.api import tokenization

    made = []

    @cache
    def make(setup: Any) -> Any:
        made.append(real(setup))
        for process in made[-1]._free.queue:
            process._spawn = forked_tokenizers.spawn
        return made[-1]

    real = tokenization.Processes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenization, "Processes", make)
        yield
    for processes in made:
        end(processes)


def end(processes: Any) -> None:
    """End the tokenizer processes of an app."""
    processes._threads.shutdown()
    while not processes._free.empty():
        processes._free.get().close()
