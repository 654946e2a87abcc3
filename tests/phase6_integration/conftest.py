from functools import cache

import pytest

from phase0_request.tokenizer import Tokenizer
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
