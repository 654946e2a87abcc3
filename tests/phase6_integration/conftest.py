from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from phase0_request.tokenizer import Tokenizer
from phase6_integration.api import tokenization
from phase6_integration.process.tokenizer_worker import TokenizerWorker
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
def shared_tokenizer_workers() -> Iterator[None]:
    """Apps of one model and one template share their tokenizer processes."""
    made: dict[Any, list[TokenizerWorker]] = {}

    def make(*setup: Any) -> TokenizerWorker:
        workers = made.setdefault(setup, [])
        if len(workers) < tokenization.WORKERS:
            workers.append(TokenizerWorker(*setup))
            return workers[-1]
        workers.append(workers.pop(0))
        return workers[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenization, "TokenizerWorker", make)
        yield
    for worker in (worker for workers in made.values() for worker in workers):
        worker.close()
