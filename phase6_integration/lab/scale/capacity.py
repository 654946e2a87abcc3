"""`python -m phase6_integration.lab scale.capacity`: an SLO, a model and a device become flags, requests and dollars.

The step takes the time that the cost model predicts from the device's datasheet, which is the least: measure how much
of that your server reaches, and give it as --reached. All requests have one length of prompt and of answer, and as many
run as fit. The TTFT is for a request that finds a place free.
"""

from dataclasses import asdict, dataclass

from rich.console import Console

from phase0_request.lab.report import add_fields, finish, parser
from phase2_prefill_decode.lab.cost import CostModel
from phase2_prefill_decode.lab.fits import MODELS, weight_bytes
from phase2_prefill_decode.lab.roofline import DEVICES, Device, predict

MEMORY = {"H200": 141, "H100 SXM": 80, "A100 80GB": 80, "RTX 4090": 24, "L4": 24}  # GB, of the same datasheets
FOR_PAGES = 0.9  # of the memory, for weights and pages


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked: the load, the limits, the price."""

    prompt: int = 1024
    answer: int = 1024
    itl: float = 0.05  # seconds
    price: float = 2.5  # dollars an hour
    reached: float = 1.0


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one device serves."""

    requests: int  # that run at once
    fit: int  # into its memory
    step_ms: float
    itl_ms: float
    ttft_ms: float
    tokens_per_second: float  # of answers
    dollars_per_million: float  # of them


def capacity(model: CostModel, device: Device, memory: float, asked: Question) -> Capacity:
    """The most requests that fit, each token of which comes within the ITL; ValueError if not even one does."""
    left = int(FOR_PAGES * memory) - weight_bytes(model.config, "bfloat16")
    fit = model.config.kv_layout(dtype=model.kv_dtype).requests_in(max(left, 0), asked.prompt + asked.answer)
    most, least = 0, fit
    while most < least:  # the ITL grows with the requests: the last that is short enough
        middle = (most + least + 1) // 2
        if _itl(model, device, middle, asked) <= asked.itl:
            most = middle
        else:
            least = middle - 1
    if not most:
        raise ValueError(
            f"not one request of {asked.prompt + asked.answer} tokens: {fit} fit, and one has an ITL of "
            f"{1e3 * _itl(model, device, 1, asked):.1f} ms"
        )
    itl = _itl(model, device, most, asked)
    rate = most / itl
    return Capacity(
        requests=most,
        fit=fit,
        step_ms=1e3 * _decode(model, device, most, asked),
        itl_ms=1e3 * itl,
        ttft_ms=1e3 * (_prefill(model, device, asked) + itl),
        tokens_per_second=rate,
        dollars_per_million=asked.price / 3600 / rate * 1e6,
    )


def _decode(model: CostModel, device: Device, requests: int, asked: Question) -> float:
    """A step of decodes, in the middle of their answers."""
    pieces = [(asked.prompt + asked.answer // 2, 1)] * requests
    return predict(model.pieces(pieces), device).seconds / asked.reached


def _prefill(model: CostModel, device: Device, asked: Question) -> float:
    return predict(model.pieces([(0, asked.prompt)]), device).seconds / asked.reached


def _itl(model: CostModel, device: Device, requests: int, asked: Question) -> float:
    """A step with its share of prompts: of each request that ends, the next one's prompt is computed."""
    return _decode(model, device, requests, asked) + requests / asked.answer * _prefill(model, device, asked)


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase6_integration.lab scale.capacity", __doc__)
    p.add_argument("--model", choices=MODELS, default="Qwen3-8B", help="(%(default)s)")
    p.add_argument("--device", choices=DEVICES, default="H100 SXM", help="(%(default)s)")
    about = {
        "prompt": "tokens of a prompt",
        "answer": "tokens of an answer",
        "itl": "seconds between tokens, at most",
        "price": "dollars an hour for the device",
        "reached": "share of the predicted speed that a server reaches",
    }
    add_fields(p, Question(), about)
    options = p.parse_args(arguments)
    asked, device = Question(**{name: getattr(options, name) for name in about}), DEVICES[options.device]
    model = CostModel(MODELS[options.model], cache=device.cache)
    try:
        found = capacity(model, device, 1e9 * MEMORY[device.name], asked)
    except ValueError as error:
        p.error(str(error))
    say = Console(highlight=False).print
    limit = "the memory" if found.requests == found.fit else "the ITL"
    say(f"{found.requests} requests at once on one {options.device}: {limit} ends there ({found.fit} fit).")
    say(f"A step of decodes takes {found.step_ms:.1f} ms, and with its share of prompts {found.itl_ms:.1f} ms.")
    say(f"A first token comes after {found.ttft_ms:.0f} ms if a place is free.")
    say(f"{found.tokens_per_second:,.0f} tokens/s of answers, ${found.dollars_per_million:.2f} per million of them.\n")
    length = asked.prompt + asked.answer
    say(f"nanoserve serve Qwen/{options.model} --max-num-seqs {found.requests} --max-model-len {length}")
    finish(p, options, arguments, asdict(found))
    return 0
