"""What a browser's tab runs in place of native libraries, where the oracle is the library, and what the book packs."""

import json
import re
import threading
from pathlib import Path
from urllib.request import urlopen

import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from chapters.book.open import listen
from chapters.book.pack import ROOT, llms, scenes
from chapters.book.tab import tokenizers as stand_in
from phase0_request.tokenizer import BUNDLED

FILE = str(BUNDLED / "tokenizer.json")
OURS, THEIRS = stand_in.Tokenizer.from_file(FILE), tokenizers.Tokenizer.from_file(FILE)
PARTS = st.sampled_from(
    ["<|im_end|>", "we'll", "It'S\n\n", "  two\t", " 2026", "caf\u00e9", "\u4f60\u597d", "a\u0301", "\U0001f680"]
)


@given(st.lists(PARTS | st.text(max_size=6)).map("".join))
def test_a_text_has_the_tokens_of_the_library_and_they_its_text(text: str) -> None:
    tokens = OURS.encode(text).ids
    assert tokens == THEIRS.encode(text).ids
    for skip in (False, True):
        assert OURS.decode(tokens, skip) == THEIRS.decode(tokens, skip)


def test_each_scene_of_a_chapter_is_packed_with_a_run_in_which_every_request_ends() -> None:
    named = {
        name for page in ROOT.glob("chapters/*.md") for name in re.findall(r"<!-- scene: (\w+) -->", page.read_text())
    }
    packed = dict(scenes())
    assert packed.keys() == named
    for name, record in packed.items():
        header, *lines = map(json.loads, record.splitlines())
        assert header["num_pages"] > 0
        come = {new["r"] for line in lines for new in line.get("new", ())}
        assert {r for line in lines for r, *_ in line.get("done", ())} == come, name


def test_llms_txt_lists_every_chapter_with_a_sentence() -> None:
    pages = re.findall(r"^- \[(.+)\]\((.+)\): (.+)\.$", llms(), re.MULTILINE)
    paths = [ROOT / path.replace(".html", ".md") for _, path, _ in pages]
    assert all(path.is_file() for path in paths)
    assert {*ROOT.glob("chapters/[0-9]*.md")} <= {*paths}
    assert len({title for title, *_ in pages}) == len(pages)


def test_the_tab_is_served_on_a_free_port_if_another_program_has_its_own(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("the engine")
    with listen(tmp_path, 0) as first, listen(tmp_path, first.server_port) as second:
        threading.Thread(target=second.serve_forever, daemon=True).start()
        assert second.server_port != first.server_port
        with urlopen(f"http://127.0.0.1:{second.server_port}/") as page:
            assert page.read() == b"the engine"
        second.shutdown()
