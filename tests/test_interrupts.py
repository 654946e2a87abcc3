"""How commands end: exit codes, Ctrl-C without a traceback, and a closed pipe."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RUN = """
import sys, signal, phase0_request.support.entry
{body}
sys.modules["program"] = sys.modules["__main__"]
phase0_request.support.entry.run("program:main")
"""


def run(body: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RUN.format(body=body)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("def main(): return 0", 0),
        ("def main(): return 3", 3),
        ("def main(): sys.exit(2)", 2),
        ("def main(): signal.raise_signal(signal.SIGINT)", 130),
        ("def main(): raise BrokenPipeError", 141),
    ],
)
def test_the_exit_code_says_how_a_command_ended(body: str, code: int) -> None:
    done = run(body)
    assert (done.returncode, done.stderr) == (code, "")


def test_ctrl_c_while_the_module_of_a_command_is_imported(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import signal; signal.raise_signal(signal.SIGINT)")
    program = f"import sys, phase0_request.support.entry as e; sys.path.append({str(tmp_path)!r}); e.run('slow:main')"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "")


def test_an_error_keeps_its_traceback() -> None:
    done = run("def main(): raise RuntimeError('a fault')")
    assert done.returncode == 1
    assert "RuntimeError: a fault" in done.stderr
