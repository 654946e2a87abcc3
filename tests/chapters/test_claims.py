"""Claims about figures: what they may say, what they may not, and that those of the book are true."""

import json
from pathlib import Path

import pytest

from chapters import claims
from chapters.course import Course

PRINTED = (1.0, 3.2, 64.0, 18.5, 1234.0)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    rates = {"batch_1": {"rate": 10, "itl_p50_ms": 2.5}, "batch_2": {"rate": 15}, "batch_16": {"rate": 80}}
    figures = {"batching": rates, "over": {"v1.2": 0.5}, "name": "cpu"}
    (tmp_path / "some.json").write_text(json.dumps({"figures": figures}))
    return tmp_path


@pytest.mark.parametrize(
    ("claim", "holds"),
    [
        ("some.json#batching.batch_16.rate >= 8 * some.json#batching.batch_1.rate", True),
        ("some.json#batching.batch_16.rate > 8 * #batching.batch_1.rate", False),
        ("1.4 < #batching.batch_2.rate / #batching.batch_1.rate < 1.6", True),
        ("grows(#batching.*.rate) and falls(3, 2, 1)", True),
        ("falls(#batching.*.rate) or not grows(#batching.*.rate)", False),
        ("max(#batching.*.rate) == #batching.batch_16.rate and min(#batching.*.rate) == 10", True),
        ("abs(#batching.batch_1.rate - #batching.batch_2.rate) == 5", True),
        ("#over.v1.2 < 1", True),  # the last part of a key may contain dots
        ("above.3 > 5 * above.1 and above.4 == 1234", True),
    ],
)
def test_a_claim_compares_figures_of_results_and_of_outputs(results: Path, claim: str, holds: bool) -> None:
    claim = claim if claim.startswith(("some", "above")) else claim.replace("#", "some.json#", 1)
    assert claims.evaluate(claim, results, PRINTED) is holds


@pytest.mark.parametrize(
    "claim",
    [
        "some.json#batching.batch_3.rate > 1",  # no such figure
        "other.json#a > 1",  # no such result
        "above.9 > 1",  # the cell printed fewer numbers
    ],
)
def test_a_claim_without_its_figure_is_an_error(results: Path, claim: str) -> None:
    with pytest.raises(claims.ClaimError):
        claims.evaluate(claim, results, PRINTED)


def test_claims_are_found_in_prose_and_not_in_code(tmp_path: Path) -> None:
    chapters = tmp_path / "chapters"
    (chapters / "results").mkdir(parents=True)
    (chapters / "results" / "a.json").write_text('{"figures": {"x": 1}}')
    fenced = "```\n<!-- claim: a.json#x == 2 -->\n```\n`<!-- claim: a.json#x == 3 -->`\n"
    (chapters / "one.md").write_text(
        f"{fenced}It is one.\n<!-- claim: a.json#x == 1 -->\nIt is four. <!-- claim: a.json#x == 4 -->"
    )
    said = {"cell_type": "markdown", "source": ["<!-- claim: above.1 == 7 -->\n", "Seven."]}
    ran = {"cell_type": "code", "execution_count": 1, "outputs": [{"output_type": "stream", "text": ["1,000 and 8\n"]}]}
    (chapters / "two.ipynb").write_text(json.dumps({"cells": [ran, said]}))
    assert claims.false_claims(Course(tmp_path)) == [
        "chapters/one.md: not true: a.json#x == 4",
        "chapters/two.ipynb: not true: above.1 == 7",
    ]


def test_every_claim_of_the_book_is_true() -> None:
    assert claims.false_claims(Course.here()) == []
