"""Random shapes of a family, beside transformers, in each setting of the engine."""

import json
from pathlib import Path

import pytest

from phase5_continuous.lab.families import identity


@pytest.mark.parametrize("family", ["lfm2", "phi3"])
def test_every_setting_of_a_shape_is_compared_and_has_the_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    """But a state cannot be cut at a page, so LFM2 shares no prefixes."""
    file = tmp_path / "identity.json"
    options = ["--families", family, "--seeds", "1", "--no-ranks", "--json", str(file)]
    assert identity.main(options) == 0
    found = json.loads(file.read_text())["figures"]["families"][family]
    same = {"same": 1, "refused": 0, "other": 0}
    refused = {"same": 0, "refused": 1, "other": 0}
    settings = dict.fromkeys(("plain", "chunks", "tiny pool", "prefix", identity.IN_BF16), same)
    assert found == (settings | {"prefix": refused} if family == "lfm2" else settings)
