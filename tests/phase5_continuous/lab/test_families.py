"""Random shapes of a family, beside transformers, in each setting of the engine."""

import json
from pathlib import Path

from phase5_continuous.lab.families import identity


def test_a_shape_has_the_tokens_of_transformers_in_each_setting_that_its_family_allows(tmp_path: Path) -> None:
    file = tmp_path / "identity.json"
    assert identity.main(["--families", "lfm2", "--seeds", "1", "--no-ranks", "--json", str(file)]) == 0
    same = {"same": 1, "refused": 0, "other": 0}
    settings = dict.fromkeys(("plain", "chunks", "tiny pool", "prefix", identity.IN_BF16), same)
    assert json.loads(file.read_text())["figures"]["families"] == {"lfm2": settings}
