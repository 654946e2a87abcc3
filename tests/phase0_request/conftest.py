import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from phase0_request import Request, SamplingParams

if TYPE_CHECKING:
    from phase0_request import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> "Tokenizer":
    from phase0_request import Tokenizer

    return Tokenizer.from_pretrained()


@pytest.fixture
def make_request() -> Callable[..., Request]:
    numbers = itertools.count(1)

    def make(prompt: int = 3, priority: int = 0, **params: Any) -> Request:
        return Request(f"r{next(numbers)}", tuple(range(10, 10 + prompt)), SamplingParams(**params), priority)

    return make
