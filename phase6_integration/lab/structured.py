"""`python -m phase6_integration.lab structured`: random JSON schemas, sampled on the bundled model and validated.

Each answer that finishes has to parse and to meet its schema, by the judgement of the `jsonschema` package.
"""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import track

from phase0_request.lab.report import finish, parser
from phase0_request.params import SamplingParams
from phase0_request.request import FinishReason
from phase2_prefill_decode.generation import Completion
from phase2_prefill_decode.model import default_device
from phase6_integration.engine.engine import NanoServingEngine
from phase6_integration.extras.structured.output_grammar import json_grammar
from phase6_integration.lab.random_schemas import Generator, Schema

PROMPT = "Describe it as JSON: "
TOGETHER = 32  # requests at a time


def violation(schema: Schema, text: str) -> str | None:
    """Why a text is not what its schema asks for."""
    from jsonschema import Draft202012Validator

    try:
        value = json.loads(text)
    except ValueError as error:
        return f"no JSON: {error}"
    found = next(Draft202012Validator(schema).iter_errors(value), None)
    return None if found is None else str(found.message)


def sample(schemas: Sequence[Schema], tokens: int, console: Console) -> list[tuple[Schema, Completion]]:
    """An answer to each schema, at temperature 1."""
    answers: list[tuple[Schema, Completion]] = []
    with NanoServingEngine.from_pretrained() as engine:
        for start in track(range(0, len(schemas), TOGETHER), "answers", console=console, transient=True):
            some = schemas[start : start + TOGETHER]
            params = [
                SamplingParams(max_tokens=tokens, seed=start + number, grammar=json_grammar(schema))
                for number, schema in enumerate(some)
            ]
            answers += zip(some, engine.generate([PROMPT] * len(some), params, progress=False), strict=True)
    return answers


def judged(answers: Sequence[tuple[Schema, Completion]]) -> dict[str, Any]:
    """How the answers ended, and the violations among those that finished."""
    wrong = [
        {"schema": schema, "text": answer.text, "why": why}
        for schema, answer in answers
        if answer.finish_reason is FinishReason.STOP and (why := violation(schema, answer.text)) is not None
    ]
    ends = Counter(answer.finish_reason.value for _, answer in answers if answer.finish_reason)
    valid = ends["stop"] - len(wrong)
    return {"answers": len(answers), "ends": dict(sorted(ends.items())), "valid": valid, "violations": wrong}


def main(arguments: list[str] | None = None) -> int:
    p = parser("phase6_integration.lab structured", __doc__)
    p.add_argument("--schemas", type=int, default=100, help="random schemas (%(default)s)")
    p.add_argument("--seed", type=int, default=0, help="of the schemas (%(default)s)")
    p.add_argument("--max-tokens", type=int, default=256, help="of an answer (%(default)s)")
    options = p.parse_args(arguments)
    console, generator = Console(highlight=False), Generator(options.seed)
    schemas = [generator.schema() for _ in range(options.schemas)]
    figures = judged(sample(schemas, options.max_tokens, console))
    ends = ", ".join(f"{count} {reason}" for reason, count in figures["ends"].items())
    console.print(f"{figures['answers']} answers: {ends}; {len(figures['violations'])} violate their schema")
    for violated in figures["violations"][:10]:
        console.print(violated, markup=False)
    finish(p, options, arguments, figures, gpu=default_device().type == "cuda")
    return 1 if figures["violations"] or "error" in figures["ends"] else 0
