"""The number of threads follows the cores that other programs leave free."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from phase2_prefill_decode import threads
from phase2_prefill_decode.threads import PERIOD, FreeCores, busy_seconds


class Machine:
    """Four cores, of which this process and other programs use what a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.own = self.busy = 0.0
        self.threads, self.asked = 4, list[int]()
        monkeypatch.setattr(threads, "cores", lambda: 4)
        monkeypatch.setattr(threads, "busy_seconds", lambda: self.busy)
        monkeypatch.setattr("time.process_time", lambda: self.own)
        monkeypatch.setattr(torch, "get_num_threads", lambda: self.threads)
        monkeypatch.setattr(torch, "set_num_threads", self.set)
        self.cores = FreeCores(lambda: self.now)

    def set(self, count: int) -> None:
        self.threads = count
        self.asked.append(count)

    def run(self, own: float, others: float, seconds: float = PERIOD) -> int:
        """Run for so long on so many cores, beside others that use so many, and then a step. Returns its threads."""
        self.now += seconds
        self.own += own * seconds
        self.busy += (own + others) * seconds
        self.cores.follow()
        return self.threads


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_threads_are_as_many_as_there_are_free_cores(machine: Machine) -> None:
    assert [machine.run(4, 0), machine.run(3.5, 0.5), machine.run(3, 1), machine.run(2, 2)] == [4, 3, 3, 2]
    assert [machine.run(1, 3), machine.run(0.5, 3.5)] == [1, 1]
    assert [machine.run(1, 0.1), machine.run(4, 0)] == [4, 4]


def test_it_does_not_look_in_every_step(machine: Machine) -> None:
    assert machine.run(0, 4, PERIOD / 3) == machine.run(0, 4, PERIOD / 3) == 4
    assert machine.run(0, 4, PERIOD) == 1


def test_what_others_did_while_no_step_ran_says_nothing(machine: Machine) -> None:
    assert machine.run(0, 4, 5.0) == 4
    assert machine.run(1, 3) == 1


def test_the_number_of_the_program_is_the_limit(machine: Machine) -> None:
    machine.threads = 2
    assert [machine.run(2, 0), machine.run(2, 4), machine.run(1, 0)] == [2, 1, 2]
    machine.threads = 3
    assert [machine.run(2, 0), machine.run(2, 4), machine.run(1, 0)] == [3, 1, 3]


def test_the_busy_time_is_that_of_the_cores_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    # user nice system idle iowait irq softirq steal guest guest_nice; guests are in user already
    stat.write_text("cpu 9 9 9 9 9 9 9 9 9 9\ncpu0 1 2 3 900 900 4 5 6 1 1\ncpu1 100 0 0 0 0 0 0 0 0 0\nintr 5\n")
    monkeypatch.setattr(threads, "STAT", stat)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    monkeypatch.setattr("os.sysconf", lambda _: 100)
    assert busy_seconds() == pytest.approx(0.21)


def test_where_the_system_does_not_tell_nothing_changes(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [machine.run(own, -own) for own in (4, 1, 4)] == [4, 4, 4], "the busy time is always 0"
    monkeypatch.setattr(threads, "STAT", Path("/nonexistent"))
    assert busy_seconds() == 0


EVERY_START = {
    "the engine of phase 2": "from phase2_prefill_decode.engine import static\n"
    "from phase2_prefill_decode.loading.model import Model\nstatic(Model.load(device='cpu')).generate(['Hello'], p)",
    "NanoServingEngine": "from phase6_integration.engine.engine import NanoServingEngine\n"
    "NanoServingEngine.from_pretrained(device='cpu', kv_cache_pages=64).generate(['Hello'], p)",
    "the bundled engine of a server": "from phase6_integration.engine.assemble import assemble\n"
    "from phase6_integration.engine.options import EngineOptions\n"
    "assemble(EngineOptions(device='cpu', kv_cache_pages=64))",
}


def test_every_engine_follows_the_free_cores() -> None:
    """In a plain Python process that loaded torch first, without variables for threads."""
    script = (
        "import torch\nfrom phase0_request.params import SamplingParams\nfrom phase2_prefill_decode import threads\n"
        "p, looks = SamplingParams(temperature=0, max_tokens=2), []\n"
        "threads.FREE_CORES.follow = lambda: looks.append(1)\n"
    )
    for name, start in EVERY_START.items():
        script += f"{start}\nprint({name!r} if looks else None)\nlooks.clear()\n"
    ended = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert ended.stdout.splitlines() == list(EVERY_START)
