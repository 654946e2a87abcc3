"""The structured lab: random schemas, sampled on the bundled model."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from phase6_integration.lab import structured
from phase6_integration.lab.random_schemas import Generator
from phase6_integration.wings.structured.output_grammar import json_grammar
from tests.phase6_integration.cities import TOKENIZER, grammars


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs are measured, and not of interest here."""
    for name, value in (("TOKENS", 4), ("BATCHES", (1,)), ("PROPERTIES", (1,))):
        monkeypatch.setattr(structured, name, value)


def figures(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    file = tmp_path / "structured.json"
    assert structured.main([*arguments, "--json", str(file)]) == 0
    found: dict[str, Any] = json.loads(file.read_text())["figures"]
    return found


def test_every_random_schema_is_one_and_can_be_enforced() -> None:
    generator = Generator(seed=3)
    schemas = [generator.schema() for _ in range(200)]
    for schema in schemas:
        jsonschema.Draft202012Validator.check_schema(schema)
        grammars(TOKENIZER).compile(json_grammar(schema))
    assert len({json.dumps(schema) for schema in schemas}) > 150
    again = Generator(seed=3)
    assert [again.schema() for _ in range(200)] == schemas


def test_finished_answers_of_the_bundled_model_meet_their_schemas(tmp_path: Path) -> None:
    found = figures(tmp_path, "--schemas", "8", "--max-tokens", "64", "--seed", "1")
    assert found["answers"] == sum(found["ends"].values()) == 8
    assert set(found["ends"]) <= {"stop", "length"}
    assert found["violations"] == []
    assert found["token_ms"]["batch_1"].keys() == {"unconstrained", "constrained"}


@pytest.mark.slow
def test_finished_answers_of_the_bundled_model_meet_hundreds_of_schemas(tmp_path: Path) -> None:
    found = figures(tmp_path, "--schemas", "400", "--seed", "2")
    assert set(found["ends"]) == {"stop", "length"}
    assert found["ends"]["stop"] > 200
    assert found["violations"] == []
