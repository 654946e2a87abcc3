"""What the primer shows of a kernel: the variables of its programs, and what the compiler makes of it."""

import subprocess
import sys
from pathlib import Path

import pytest

from phase0_request.support import entry
from phase1_kv_pool.kernels import prepare_triton
from phase2_prefill_decode.lab.primer.watch import main

CHAPTER = Path(__file__).parents[3] / "chapters/02_first_kernel.md"


@pytest.mark.skipif(not prepare_triton(), reason="a GPU compiles kernels: their programs have no variables to show")
def test_the_programs_of_the_first_kernel_are_as_the_chapter_shows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--length", "10", "--block", "4"]) == 0
    printed = capsys.readouterr().out
    assert printed[printed.index("program 2") : printed.index("y: ")] in CHAPTER.read_text()


def test_a_block_that_is_no_power_of_two_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--block", "6"])
    assert "a power of two numbers, got 6" in capsys.readouterr().err


def read(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "phase2_prefill_decode.lab", "primer.read", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=entry.environment())


def test_every_puzzle_compiles_for_a_hopper_without_a_stack_and_attention_on_tensor_cores() -> None:
    lines = read().stdout.splitlines()
    assert len(lines) == 10
    for line in lines:
        assert " 0 bytes of stack" in line
        assert (" 0 tensor core" not in line) == line.startswith(("attention", "paged", "split")), line


def test_a_kernel_that_only_the_interpreter_takes_is_refused_at_its_line(tmp_path: Path) -> None:
    source = Path("phase2_prefill_decode/lab/primer/puzzles.py").read_text()
    mine = tmp_path / "puzzles.py"
    mine.write_text(source.replace("m_i, l_i, acc = -1e38, 0.0, 0.0", "m_i, l_i, acc = -1e38, 0, 0.0"))
    said = read("online", "--file", str(mine))
    assert said.returncode == 1
    assert "does not compile for sm_90" in said.stdout
    assert "Loop-carried variable l_i" in said.stdout


def test_the_first_form_has_the_operations_that_the_chapter_shows() -> None:
    text = CHAPTER.read_text()
    listing = text[text.index("%p = tt.get_program_id") :].partition("```")[0].split("\n")
    form = [line.strip() for line in read("scale", "--stage", "ttir").stdout.splitlines()]
    for line in filter(None, listing):
        assert line in form
