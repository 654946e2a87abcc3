"""`python -m phase6_integration.lab structured`: random JSON schemas, sampled on the bundled model and validated.

Each answer that finishes has to parse and to meet its schema, by the judgement of the `jsonschema` package. Then what a
grammar costs: the time to compile it, by the size of its schema, and the time a token, beside unconstrained output.
"""

import json
import time
from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track

from phase0_request.lab.report import finish, parser, table
from phase0_request.params import SamplingParams
from phase0_request.request import FinishReason
from phase0_request.tokenizer import Tokenizer
from phase2_prefill_decode.generation import Completion
from phase6_integration.engine.engine import NanoServingEngine
from phase6_integration.lab.random_schemas import Generator, Schema
from phase6_integration.wings.structured.client_grammars import ClientGrammars
from phase6_integration.wings.structured.output_grammar import json_grammar

PROMPT = "Describe it as JSON: "
TOGETHER = 32  # requests at a time
ENDLESS: Schema = {"type": "array", "minItems": 10_000, "items": {"type": "string", "maxLength": 24}}
PROPERTIES = (1, 10, 100, 400)  # of the schemas that are compiled
BATCHES = (1, 16)
TOKENS = 128  # of an answer whose tokens are timed


def violation(schema: Schema, text: str) -> str | None:
    """Why a text is not what its schema asks for."""
    from jsonschema import Draft202012Validator

    try:
        value = json.loads(text)
    except ValueError as error:
        return f"no JSON: {error}"
    found = next(Draft202012Validator(schema).iter_errors(value), None)
    return None if found is None else str(found.message)


def sample(
    engine: NanoServingEngine, schemas: Sequence[Schema], tokens: int, console: Console
) -> list[tuple[Schema, Completion]]:
    """An answer to each schema, at temperature 1."""
    found: list[tuple[Schema, Completion]] = []
    for start in track(range(0, len(schemas), TOGETHER), "answers", console=console, transient=True):
        some = schemas[start : start + TOGETHER]
        params = [
            SamplingParams(max_tokens=tokens, seed=start + number, grammar=json_grammar(schema))
            for number, schema in enumerate(some)
        ]
        found += zip(some, engine.generate([PROMPT] * len(some), params, progress=False), strict=True)
    return found


def compile_ms(grammars: ClientGrammars, schema: Schema) -> float:
    """Of five, the median."""
    grammar, seconds = json_grammar(schema), []
    for _ in range(5):
        grammars.forget()
        start = time.perf_counter()
        grammars.compile(grammar)
        seconds.append(time.perf_counter() - start)
    return 1e3 * median(seconds)


def of_size(properties: int) -> Schema:
    """An object with so many properties."""
    names = [f"property {number}" for number in range(properties)]
    kinds: list[Schema] = [{"type": "string"}, {"type": "integer", "minimum": 0}, {"enum": ["red", "green", "blue"]}]
    described = {name: kinds[number % 3] for number, name in enumerate(names)}
    return {"type": "object", "properties": described, "required": names, "additionalProperties": False}


def token_ms(engine: NanoServingEngine, batch: int, grammar: str | None) -> float:
    """Milliseconds between the tokens of a request, the least of three runs."""
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, grammar=grammar, seed=0)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        engine.generate([PROMPT] * batch, params, progress=False)
        seconds.append(time.perf_counter() - start)
    return 1e3 * min(seconds) / TOKENS


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
    tokenizer = Tokenizer.from_pretrained()
    grammars = ClientGrammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    compiled = {f"properties_{size}": compile_ms(grammars, of_size(size)) for size in PROPERTIES}
    compiled["random_median"] = median(compile_ms(grammars, schema) for schema in schemas)
    ways = {"unconstrained": None, "constrained": json_grammar(ENDLESS)}
    with NanoServingEngine.from_pretrained() as engine:
        found = judged(sample(engine, schemas, options.max_tokens, console))
        cost = {
            f"batch_{batch}": {name: token_ms(engine, batch, grammar) for name, grammar in ways.items()}
            for batch in BATCHES
        }
    rows = [(f"compile, {name}", ms) for name, ms in compiled.items()]
    rows += [(f"token, {batch}, {name}", ms) for batch, both in cost.items() for name, ms in both.items()]
    console.print(table(("", "ms"), rows, digits=2))
    ends = ", ".join(f"{count} {reason}" for reason, count in found["ends"].items())
    console.print(f"\n{found['answers']} answers: {ends}; {len(found['violations'])} violate their schema")
    for violated in found["violations"][:10]:
        console.print(violated, markup=False)
    finish(p, options, arguments, {**found, "compile_ms": compiled, "token_ms": cost})
    return 1 if found["violations"] or "error" in found["ends"] else 0
