"""Random schemas, and the bundled model's answers to them."""

import json
from pathlib import Path

import jsonschema
import pytest

from phase6_integration.extras.structured.output_grammar import json_grammar
from phase6_integration.lab import structured
from phase6_integration.lab.random_schemas import Generator
from tests.phase6_integration.cities import TOKENIZER, grammars


def test_every_random_schema_is_one_and_can_be_enforced() -> None:
    generator = Generator(seed=3)
    schemas = [generator.schema() for _ in range(200)]
    for schema in schemas:
        jsonschema.Draft202012Validator.check_schema(schema)
        grammars(TOKENIZER).compile(json_grammar(schema))
    assert len({json.dumps(schema) for schema in schemas}) > 150
    again = Generator(seed=3)
    assert [again.schema() for _ in range(200)] == schemas


@pytest.mark.parametrize(
    ("schemas", "tokens", "finished"), [(8, 64, 0), pytest.param(400, 256, 200, marks=pytest.mark.slow)]
)
def test_finished_answers_of_the_bundled_model_meet_their_schemas(
    tmp_path: Path, schemas: int, tokens: int, finished: int
) -> None:
    file = tmp_path / "structured.json"
    options = ["--schemas", f"{schemas}", "--max-tokens", f"{tokens}", "--seed", "1"]
    assert structured.main([*options, "--json", str(file)]) == 0
    found = json.loads(file.read_text())["figures"]
    assert found["answers"] == sum(found["ends"].values()) == schemas
    assert set(found["ends"]) <= {"stop", "length"}
    assert found["ends"].get("stop", 0) == found["valid"] >= finished
    assert found["violations"] == []
