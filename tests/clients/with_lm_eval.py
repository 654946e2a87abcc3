"""lm-eval: `local-completions` and `local-chat-completions`, with the kinds of request that its tasks have."""

from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI
from openai import OpenAI
from subject import QUESTION, Server

TOKENIZER = Path(__file__).parents[2] / "phase0_request/tiny_chat"
UNTIL = {"until": ["\n\n"], "max_gen_toks": 16}


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, one, i) for i, one in enumerate(arguments)]


@pytest.fixture
def options(server: Server, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("OPENAI_API_KEY", server.key)
    where = {"model": server.model, "base_url": f"{server.url}/completions"}
    return {**where, "tokenizer_backend": "huggingface", "tokenizer": str(TOKENIZER), "max_retries": 1}


@pytest.mark.parametrize("how", [{"batch_size": 4}, {"num_concurrent": 4}, {"tokenized_requests": False}])
def test_log_likelihoods(options: dict[str, Any], how: dict[str, Any]) -> None:
    """What the model writes greedily is likelier than anything else."""
    with OpenAI(base_url=options["base_url"].removesuffix("/completions")) as client:
        written = client.completions.create(model="tiny_chat", prompt="Paging is", temperature=0, max_tokens=4)
    asked = [("Paging is", written.choices[0].text), ("Paging is", " zebra"), ("", "Paging is")]
    (best, greedy), (other, not_greedy), _ = LocalCompletionsAPI(**options, **how).loglikelihood(
        requests("loglikelihood", *asked)
    )
    assert 0 > best > other
    assert greedy
    assert not not_greedy


def test_rolling_log_likelihood(options: dict[str, Any]) -> None:
    asked = requests("loglikelihood_rolling", ("A page holds the keys and values of sixteen tokens. " * 4,))
    (found,) = LocalCompletionsAPI(**options).loglikelihood_rolling(asked)
    assert found < 0


def test_generations(options: dict[str, Any]) -> None:
    asked = requests("generate_until", ("Paging is", UNTIL), ("The scheduler", UNTIL))
    first, second = LocalCompletionsAPI(**options).generate_until(asked)
    assert first != second
    assert "\n\n" not in first + second


def test_generations_of_a_chat(options: dict[str, Any]) -> None:
    chat = {**options, "base_url": options["base_url"].replace("/completions", "/chat/completions")}
    model = LocalChatCompletion(**{**chat, "tokenizer_backend": None})
    prompt = model.apply_chat_template([{"role": "user", "content": QUESTION}])
    (found,) = model.generate_until(requests("generate_until", (prompt, UNTIL)))
    assert found
