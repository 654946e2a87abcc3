import pytest

from tests.phase6_integration.real_engine import GREEDY, PROMPTS


@pytest.fixture(scope="session")
def offline() -> list[list[int]]:
    """What the engine in this process answers."""
    from phase6_integration.engine import NanoServingEngine  # torch: not before the environment it looks at is set

    with NanoServingEngine.from_pretrained(kv_cache_pages=256) as made:
        return [completion.output_tokens for completion in made.generate(PROMPTS, GREEDY)]
