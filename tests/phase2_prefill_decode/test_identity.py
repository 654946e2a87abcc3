"""Identity with transformers, in tokens and logits: every family, and the bundled model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from phase0_request.batch import Batch, Slice
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase0_request.tokenizer import BUNDLED
from phase1_kv_pool.cache import PagedCache
from phase1_kv_pool.pool import KVPool
from phase2_prefill_decode.engine import static
from phase2_prefill_decode.model import Model
from tests.phase2_prefill_decode.models import VARIANTS, saved, variant
from tests.phase2_prefill_decode.steps import loaded

LENGTHS = (1, 3, 15, 16, 17, 50)  # one token, and around and over several pages
ANSWER = 32  # past position 64, where the embeddings of two kinds of rope change


def prompts(vocabulary: int, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocabulary, (length,), generator=draw).tolist() for length in lengths]


def theirs(model: Any, prompt: list[int], output: int = ANSWER) -> list[int]:
    """The answer of transformers to one prompt, alone, so that nothing is padded."""
    how = GenerationConfig(do_sample=False, max_new_tokens=output, eos_token_id=None, pad_token_id=0)
    tokens = torch.tensor([prompt])
    with torch.inference_mode():
        whole = model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=how)
    found: list[int] = whole[0, len(prompt) :].tolist()
    return found


def logits(model: Model, prompt: list[int], page_size: int = 16) -> Tensor:
    """The logits after every token of a prompt, computed one decode at a time: [tokens, vocabulary]."""
    cache = PagedCache(64, page_size)
    decoder = model.decoder
    pool = KVPool(model.config.kv_layout(page_size), 64, decoder.device, decoder.dtype)
    request = Request("r", tuple(prompt))
    request.admit(0.0)
    cache.attach(request)
    cache.grow(request, len(prompt))
    rows = []
    for stop in range(1, len(prompt) + 1):
        known = Request("r", tuple(prompt[:stop]))
        packed = loaded(Batch((Slice(known, stop - 1, 1),)), cache, decoder.device)
        rows.append(decoder(packed, pool.layers)[0])
    return torch.cat(rows)


def follows(model: Any, prompt: list[int], answer: list[int]) -> bool:
    """Whether an answer is what the oracle generates greedily, up to ties."""
    return short_of_likeliest(model, prompt, answer) < 1e-5


def short_of_likeliest(model: Any, prompt: list[int], answer: list[int]) -> float:
    """How far at most a token of an answer is below the one that the oracle finds likeliest after those before it. 0 is
    what generating greedily means, found in one forward instead of one a token."""
    with torch.inference_mode():
        rows = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return float((rows.amax(-1) - rows.gather(-1, torch.tensor(answer)[:, None])[:, 0]).max())


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_has_the_tokens_and_logits_of_transformers(name: str, tmp_path: Path) -> None:
    """In float32 and bfloat16: tokens of a ragged batch, and logits of every position, decoded one at a time."""
    oracle = variant(name)
    model = Model.load(saved(oracle, tmp_path), device="cpu", dtype="float32")
    given = prompts(oracle.config.vocab_size)
    answers = static(model).generate(given, SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True))
    for prompt, answer in zip(given, answers, strict=True):
        assert len(answer.output_tokens) == ANSWER
        assert follows(oracle, prompt, answer.output_tokens)
    (prompt,) = prompts(oracle.config.vocab_size, [41])
    with torch.inference_mode():
        wanted = oracle(torch.tensor([prompt])).logits[0]
        assert (logits(model, prompt) - wanted).abs().max() < 1e-4
        theirs_in_bf16 = oracle.to(torch.bfloat16)(torch.tensor([prompt])).logits[0].float()
        wanted = oracle.float()(torch.tensor([prompt])).logits[0]  # the same weights, without further rounding
    found = logits(Model.load(tmp_path, device="cpu", dtype="bfloat16"), prompt).float()
    # Random models amplify rounding more than trained ones: it moves transformers' own logits by two percent.
    assert (found - wanted).norm() < min(3e-2 * wanted.norm(), 1.5 * (theirs_in_bf16 - wanted).norm())


@pytest.fixture(scope="module")
def bundled_oracle() -> Any:
    return AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def bundled() -> Model:
    return Model.load(device="cpu", dtype="float32")


class TestTheBundledModel:
    @pytest.mark.proof
    def test_greedy_has_the_tokens_of_transformers(self, bundled_oracle: Any, bundled: Model) -> None:
        """Up to the end of the answer. In the noise after it tokens tie, and each is one of the likeliest."""
        assert bundled.tokenizer is not None
        questions = ["What is a KV cache?", "Hello!", "Why does paging matter, and for whom?"]
        chats = [bundled.tokenizer.chat([{"role": "user", "content": question}]) for question in questions]
        given = [*chats, *prompts(4096, [1, 16, 33, 130])]
        params = SamplingParams(temperature=0, max_tokens=96, ignore_eos=True)
        answers = [answer.output_tokens for answer in static(bundled).generate(given, params)]
        for chat, answer in zip(chats, answers, strict=False):
            end = min(answer.index(eos) for eos in bundled.eos_ids if eos in answer) + 1
            assert answer[:end] == theirs(bundled_oracle, chat, end)
        for prompt, answer in zip(given, answers, strict=True):
            assert len(answer) == 96
            assert short_of_likeliest(bundled_oracle, prompt, answer) < 1e-4
