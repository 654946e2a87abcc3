"""`python -m phase5_continuous.lab speculation`: tokens a second with drafts and without, in turns.

A model answers questions, by default the bundled one: new ones, such that it has answered before in the same
conversation, so that its answer copies its prompt, and with method suffix such that it has answered in another
conversation, in text and in JSON of a schema. Then, for the bundled model, a drafter that knows the output proposes
tokens of which a chosen share is right: copied text has about 0.95, code 0.7, chat 0.3. It also drafts for random
weights of another shape, which no other drafter could guess.

With `--drafter`, a draft model of the bundled one's tokens drafts instead: for the bundled model, and for one that is
the bundled model with seven times as many layers more, which add nothing. That one has the same answers, and is slower.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from rich.console import Console

from phase0_request.lab.report import at_least_one, finish, parser, table
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase0_request.tokenizer import BUNDLED
from phase2_prefill_decode.connect import backend_for
from phase2_prefill_decode.decoder import Decoder
from phase2_prefill_decode.engine import Engine
from phase2_prefill_decode.lab.shapes import SHAPES
from phase2_prefill_decode.loading.checkpoint import Checkpoint
from phase2_prefill_decode.loading.config import ModelConfig
from phase2_prefill_decode.loading.weights import load_weights
from phase2_prefill_decode.model import Model
from phase5_continuous.engine import continuous
from phase5_continuous.extras.speculation.speculation import speculation_in
from phase5_continuous.lab.constrained import SCHEMA, json_grammar
from phase5_continuous.scheduler import Scheduler

BATCHES = 1, 4, 16
SHARES = 0.95, 0.7, 0.3, 0.0  # of the drafter that knows the output
TOKENS = {"tiny_chat": 128, "596m": 32}
PROMPT = 32
DEEPER = 8  # times as many layers
NGRAM, SUFFIX = {"method": "ngram"}, {"method": "suffix"}
QUESTIONS = (
    "What is a KV cache?", "Why does paging matter?", "What is prefill?", "What is decode?", "What is a token?",
    "Why does temperature matter?", "How does streaming work?", "What is the roofline model?", "What is Morse code?",
    "Why do output tokens cost more?", "What is a prefix cache?", "What is a stop string?", "Who was Alan Turing?",
    "How does detokenization work?", "What is continuous batching?", "Why does memory bandwidth matter?",
)  # fmt: skip

Prompts = Sequence[list[int]]


class Known:
    """Drafts of an output that is known: each token is right with a probability, else another."""

    def __init__(self, outputs: Mapping[tuple[int, ...], Sequence[int]], share: float) -> None:
        self.outputs = outputs
        self.share = share
        self.rng = random.Random(0)

    def propose(self, request: Request, most: int) -> Sequence[int]:
        done = len(request.output_tokens)
        known = self.outputs[request.prompt_tokens][done : done + most]
        return [token if self.rng.random() < self.share else token ^ 1 for token in known]


def compare(
    plain: Engine[Scheduler], drafting: Engine[Scheduler], prompts: Prompts, params: SamplingParams, rounds: int
) -> dict[str, float]:
    """The same requests with each engine in turns. The fastest round of each counts: others only ever slow one down."""
    seconds: dict[Engine[Scheduler], list[float]] = {plain: [], drafting: []}
    speculation, wanted, tokens = speculation_in(drafting.core.scheduler), None, 0
    assert speculation is not None
    for _ in range(1 + rounds):  # the first also fills the prefix caches
        for engine, times in seconds.items():
            started = time.perf_counter()
            answers = [answer.output_tokens for answer in engine.generate(prompts, params)]
            times.append(time.perf_counter() - started)
            wanted = wanted or answers
            assert answers == wanted, "drafts change nothing but the time"
            tokens = sum(map(len, answers))
    without, with_drafts = (min(times[1:]) for times in seconds.values())
    return {
        "plain": tokens / without,
        "drafts": tokens / with_drafts,
        "ratio": without / with_drafts,
        "drafted": speculation.drafted / (1 + rounds) / tokens,
        "acceptance": sum(speculation.accepted) / max(speculation.drafted, 1),
    }


def answers(model: Model, rounds: int, batches: Sequence[int]) -> dict[str, dict[str, float]]:
    """A model's answers to new questions and to ones asked again, by the same client or by others."""
    params, plain, figures = SamplingParams(temperature=0, max_tokens=64), continuous(model), dict[str, Any]()
    assert model.tokenizer is not None
    chat = model.tokenizer.chat
    asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
    said = plain.generate([chat(messages) for messages in asked], params)
    again = [
        [*messages, {"role": "assistant", "content": answer.text}, *messages]
        for messages, answer in zip(asked, said, strict=True)
    ]
    schema = {"type": "array", "items": SCHEMA, "minItems": 3, "maxItems": 3}
    json = replace(params, max_tokens=300, grammar=json_grammar(schema))
    texts = (
        ("asked_again", again, NGRAM, params),
        ("asked_by_others", asked, SUFFIX, params),
        ("json_by_others", asked, SUFFIX, json),
        ("new", asked, NGRAM, params),
    )
    for name, conversations, config, params in texts:
        for batch in batches:
            prompts = [chat(messages) for messages in conversations[:batch]]
            drafting = continuous(model, speculative_config=config)
            figures[f"{name}_{batch}"] = compare(plain, drafting, prompts, params, rounds)
    return figures


def constructed(model: Model, tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    """Drafts by a drafter that knows the output, and is right about a share of its tokens."""
    params, plain, figures = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), continuous(model), {}
    rng = random.Random(0)
    prompts = [rng.choices(range(8, 260), k=PROMPT) for _ in range(max(BATCHES))]
    for batch in BATCHES:
        some = prompts[:batch]
        said = plain.generate(some, params)
        known = {tuple(prompt): answer.output_tokens for prompt, answer in zip(some, said, strict=True)}
        for share in SHARES:
            drafting = continuous(model, speculative_config=NGRAM)
            speculation = speculation_in(drafting.core.scheduler)
            assert speculation is not None
            speculation.proposer = Known(known, share)
            name = f"right_{round(100 * share)}_{batch}"
            figures[name] = compare(plain, drafting, some, params, rounds)
    return figures


def deeper() -> Model:
    """The bundled model, and more layers with outputs of 0: its logits are the same to the last bit."""
    config = ModelConfig.from_pretrained(BUNDLED)
    weights = load_weights(Checkpoint(BUNDLED), config)
    layers = [*weights.layers]
    last, layers_in_all = layers[-1], DEEPER * len(layers)
    nothing = last | {name: torch.zeros_like(last[name]) for name in ("o_proj", "down_proj")}
    config = replace(config, num_hidden_layers=layers_in_all, layers=())
    more = [nothing] * (layers_in_all - len(layers))
    backend = backend_for(torch.device("cpu"))
    decoder = Decoder(config, replace(weights, layers=[*layers, *more]), backend)
    return Model(config, decoder, Model.load(device="cpu").tokenizer)


def drafted(drafter: str, rounds: int) -> dict[str, dict[str, float]]:
    """Answers with drafts of a draft model: as long as pays, and for the bundled one also as if they cost nothing."""
    figures, config = dict[str, Any](), {"method": "draft_model", "model": drafter}
    bundled = Model.load(device="cpu")
    for name, model in (("bundled", bundled), ("bundled_always", bundled), ("deeper", deeper())):
        plain = continuous(model)
        assert model.tokenizer is not None
        for temperature, kind in ((0.0, "greedy"), (0.7, "sampled")):
            params = SamplingParams(temperature=temperature, max_tokens=64, seed=1)
            for batch in BATCHES:
                prompts = [model.tokenizer.chat([{"role": "user", "content": asked}]) for asked in QUESTIONS[:batch]]
                drafting = continuous(model, speculative_config=config)
                speculation = speculation_in(drafting.core.scheduler)
                draft_model = None if speculation is None else speculation.draft_model
                assert draft_model is not None
                cost = draft_model.cost
                if name == "bundled_always":
                    draft_model.cost = 0
                of_both = compare(plain, drafting, prompts, params, rounds)
                figures[f"{name}_{kind}_{batch}"] = of_both | {"cost": cost}
    return figures


def model_of(name: str) -> Model:
    if name in SHAPES:
        return Model.random(SHAPES[name], device="cpu")
    return Model.load(BUNDLED if name == "tiny_chat" else name, device="cpu")


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase5_continuous.lab speculation", __doc__)
    about = "a directory or a GGUF file, or 596m: random weights (%(default)s)"
    p.add_argument("--model", default="tiny_chat", help=about)
    p.add_argument("--batches", nargs="+", type=at_least_one, metavar="N", help="requests with --model (1 4 16)")
    p.add_argument("--drafter", metavar="DIR", help="a draft model for the bundled one (none)")
    p.add_argument("--rounds", type=at_least_one, default=5, help="of which the best counts (%(default)s)")
    p.add_argument("--threads", type=at_least_one, help="of torch (torch's choice)")
    options, console = p.parse_args(arguments), Console(highlight=False)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    studies: list[Callable[[], dict[str, dict[str, float]]]] = []
    if options.drafter is not None:
        studies.append(partial(drafted, options.drafter, options.rounds))
    else:
        model = model_of(options.model)
        if options.model not in SHAPES:
            studies.append(partial(answers, model, options.rounds, options.batches or BATCHES))
        if options.model in TOKENS:
            studies.append(partial(constructed, model, TOKENS[options.model], options.rounds))
    figures = dict[str, dict[str, float]]()
    for study in studies:
        figures |= study()
    rows = [(name.replace("_", " "), *of_name.values()) for name, of_name in figures.items()]
    console.print(table(("text and requests", *next(iter(figures.values()))), rows, 2))
    finish(p, options, arguments, figures)
    return 0
