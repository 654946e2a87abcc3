import itertools
from collections.abc import Callable
from typing import Any

import pytest

from phase0_request import Request, SamplingParams, Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_pretrained()


@pytest.fixture
def make_request() -> Callable[..., Request]:
    numbers = itertools.count(1)

    def make(prompt: int = 3, priority: int = 0, **params: Any) -> Request:
        return Request(f"r{next(numbers)}", tuple(range(10, 10 + prompt)), SamplingParams(**params), priority)

    return make
