"""Ctrl-C at any moment of any command: exit code 130, and no traceback."""

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Runs a module, and presses Ctrl-C when `entry.run` has made so many calls of Python functions; then says their number.
PRESS = """
import runpy, signal, sys
press_at, calls, counting = int(sys.argv[1]), 0, False
def count(frame, event, argument):
    global calls, counting
    if event != "call":
        return
    calls += counting
    counting = counting or (frame.f_code.co_name == "run" and frame.f_code.co_filename.endswith("entry.py"))
    if calls == press_at > 0:
        sys.setprofile(None)
        signal.raise_signal(signal.SIGINT)
del sys.argv[0:2]
sys.setprofile(count)
try:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
finally:
    sys.setprofile(None)
    if not press_at:
        print("calls", calls, file=sys.stderr)
"""
QUICK = [
    ("phase0_request", "--num-requests", "4", "--max-tokens", "4"),
    ("phase4_radix",),
    ("chapters", "status"),
]
LONG = [
    ("phase1_kv_pool",),
    ("phase2_prefill_decode", "--max-tokens", "4"),
    ("phase3_chunked_prefill",),
    ("phase5_continuous",),
    ("phase6_integration", "--requests", "2", "--max-tokens", "4"),
    ("phase6_integration.cli", "generate", "--max-tokens", "4", "What is a page?"),
    ("phase6_integration.cli", "doctor"),
]
ENDED = (130, -signal.SIGINT)  # a shell reports both as 130


def press(at: int, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PRESS, str(at), *command], cwd=ROOT, capture_output=True, text=True, timeout=300
    )


def check_interrupts(moments: int, command: tuple[str, ...]) -> None:
    whole = press(0, *command)
    assert whole.returncode == 0, whole.stderr
    calls = int(whole.stderr.rsplit("calls ", 1)[1])
    draw = random.Random(0)
    early = [round(10 ** (draw.random() * 3)) for _ in range(moments // 2)]  # imports are at the beginning
    for at in sorted([*early, *(draw.randint(1, calls * 9 // 10) for _ in range(moments - len(early)))]):
        done = press(at, *command)
        assert done.returncode in ENDED, f"call {at} of {calls}: {done.returncode}\n{done.stderr}"
        assert "Traceback" not in done.stderr, f"call {at} of {calls}: {done.stderr}"
        assert "Exception ignored" not in done.stderr, f"call {at} of {calls}: {done.stderr}"


@pytest.mark.parametrize("command", QUICK, ids=" ".join)
def test_ctrl_c_at_many_moments(command: tuple[str, ...]) -> None:
    check_interrupts(4, command)


@pytest.mark.slow
@pytest.mark.parametrize("command", QUICK + LONG, ids=" ".join)
def test_ctrl_c_at_very_many_moments(command: tuple[str, ...]) -> None:
    check_interrupts(12, command)


RUN = """
import sys, phase0_request.entry
{body}
sys.modules["program"] = sys.modules["__main__"]
phase0_request.entry.run("program:main")
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
        ("def main(): raise KeyboardInterrupt", 130),
        ("def main():\n    try: raise KeyboardInterrupt\n    except KeyboardInterrupt: raise RuntimeError", 130),
        ("def main():\n    try: raise KeyboardInterrupt\n    except KeyboardInterrupt: return 0", 0),
        ("def main(): raise BaseExceptionGroup('', [ValueError(), KeyboardInterrupt()])", 130),
        ("def main(): raise BrokenPipeError", 141),
    ],
)
def test_the_exit_code_says_how_a_command_ended(body: str, code: int) -> None:
    done = run(body)
    assert (done.returncode, done.stderr) == (code, "")


def test_an_interrupt_inside_a_destructor_is_not_lost() -> None:
    """Python prints it and goes on."""
    done = run(
        "class Loud:\n    def __del__(self): raise KeyboardInterrupt\ndef main():\n    Loud()\n    while True: pass"
    )
    assert (done.returncode, done.stderr) == (130, "")


# Presses Ctrl-C where the call enters that function of that file; where no function is named, anywhere in the file.
PRESS_IN = """
def main():
    import signal
    {before}
    def press(frame, event, argument):
        if frame.f_code.co_filename.endswith({file!r}) and {function!r} in (frame.f_code.co_name, ""):
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)
    sys.setprofile(press)
    {call}
    while True: pass
"""


def test_an_interrupt_that_torch_would_make_a_value_error_is_not_lost() -> None:
    before = "import torch; storage = torch.zeros(8, dtype=torch.uint8).untyped_storage()"
    call = "torch.asarray(storage, dtype=torch.uint8)"
    done = run(PRESS_IN.format(before=before, call=call, file="torch/storage.py", function=""))
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize("function", ["__init__", "detach"])
def test_an_interrupt_leaves_no_half_made_or_half_freed_object_of_llvm(function: str) -> None:
    """Its destructor would print an AttributeError, or free it a second time and abort the process."""
    before = "import llvmlite.binding as llvm"
    call = 'llvm.parse_assembly("").close()'
    done = run(PRESS_IN.format(before=before, call=call, file="llvmlite/binding/ffi.py", function=function))
    assert (done.returncode, done.stderr) == (130, "")


def test_an_error_that_no_interrupt_caused_keeps_its_traceback() -> None:
    done = run("def main(): raise RuntimeError('a fault')")
    assert done.returncode == 1
    assert "RuntimeError: a fault" in done.stderr


def test_a_command_that_starts_deaf_to_ctrl_c_stays_so() -> None:
    """A shell's background job ignores SIGINT; so does its command."""
    ignored = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    done = run(ignored + "def main():\n    signal.raise_signal(signal.SIGINT)\n    return 0")
    assert (done.returncode, done.stderr) == (0, "")
