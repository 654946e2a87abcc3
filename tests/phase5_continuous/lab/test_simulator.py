import json
import subprocess
import sys
import tracemalloc
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import pytest

from phase0_request.lab.metrics import percentile
from phase0_request.request import FinishReason, Request
from phase2_prefill_decode.lab.cost import Load
from phase2_prefill_decode.lab.roofline import DEVICES
from phase5_continuous.invariants import check
from phase5_continuous.lab import simulator
from phase5_continuous.lab.simulator import WAYS, Setting, Simulation, main, simulate
from phase5_continuous.lab.stats import SLO
from phase5_continuous.lab.traces import Arrival, Trace
from phase5_continuous.scheduler import Scheduler
from tests.terminal import after_the_view, on_a_terminal

SMALL = Setting(model="17m", device=DEVICES["L4"], pages=256, max_running=32, chunk=64, budget=128, max_tokens=64)
TRACE = Trace(requests=120, rate=4000.0, prompt=40, answer=12, max_prompt=400, max_answer=64)


class Second:
    """A machine on which every step takes a second, whatever is in it."""

    def load(self, pieces: object, yields: int) -> Load:
        return Load(1, 0, 0, yields)

    def seconds(self, load: Load) -> float:
        return 1.0


def at(time: float, prompt: int, answer: int, name: int) -> Arrival:
    return Arrival(time, (name, *(1,) * (prompt - 1)), answer)


def tokens_at(arrivals: list[Arrival], setting: Setting) -> dict[str, list[float]]:
    """The times of each request's tokens, if a step takes a second."""
    simulation, times = Simulation(arrivals, setting), dict[str, list[float]]()
    simulation.runner.times = Second()  # type: ignore[assignment]
    while simulation.going:
        step = simulation.step()
        times |= {event.request.id: event.request.times.tokens for event in (step.events if step else ())}
    return times


class TestSchedulesByHand:
    """Prompt and output tokens: r0 6 and 4, r1 (at 0.5 s) 10 and 2, r2 (at 1.5 s) 2 and 3. A step takes a second."""

    arrivals = (at(0, 6, 4, 7), at(0.5, 10, 2, 8), at(1.5, 2, 3, 9))
    setting = Setting(pages=32, page_size=4, max_running=2, chunk=4, budget=8, prefix_cache=False, max_tokens=8)

    def test_static(self) -> None:
        """r0 runs alone until it has ended; r1 and r2 arrive meanwhile and are the next batch."""
        assert tokens_at([*self.arrivals], replace(self.setting, way="static")) == {
            "r0": [1, 2, 3, 4],
            "r1": [5, 6],
            "r2": [5, 6, 7],
        }

    def test_whole_prompts(self) -> None:
        """r1 is admitted in the second step, r2 when a place is free: in the fourth."""
        assert tokens_at([*self.arrivals], replace(self.setting, way="whole")) == {
            "r0": [1, 2, 3, 4],
            "r1": [2, 3],
            "r2": [4, 5, 6],
        }

    def test_chunks(self) -> None:
        """r0 in chunks of 4 and 2; r1, beside it, of 4, 4 and 2. Two may run, so r2 is admitted when r1 has ended, in
        the sixth step."""
        assert tokens_at([*self.arrivals], replace(self.setting, way="fcfs")) == {
            "r0": [2, 3, 4, 5],
            "r1": [4, 5],
            "r2": [6, 7, 8],
        }

    def test_an_idle_simulation_skips_to_the_next_arrival(self) -> None:
        """To the moment of that arrival and not beyond it."""
        assert tokens_at([at(0, 2, 2, 7), at(9.5, 2, 1, 8), at(10, 2, 1, 9)], self.setting) == {
            "r0": [1, 2],
            "r1": [10.5],
            "r2": [11.5],
        }


class TestTheSimulation:
    @pytest.mark.parametrize("way", WAYS)
    def test_the_same_seed_gives_the_same_outcome(self, way: str) -> None:
        setting = replace(SMALL, way=way)
        first, again = (simulate(TRACE.arrivals(), setting) for _ in range(2))
        assert first == again
        assert first != simulate(replace(TRACE, seed=1).arrivals(), setting)

    @pytest.mark.parametrize("kind", ["poisson", "bursty", "chat"])
    @pytest.mark.parametrize("way", WAYS)
    def test_every_request_has_as_many_tokens_as_the_trace_says(self, way: str, kind: str) -> None:
        arrivals = list(replace(TRACE, kind=kind, requests=30).arrivals())
        simulation, lengths = Simulation(arrivals, replace(SMALL, way=way)), dict[str, int]()
        while simulation.going:
            step = simulation.step()
            if isinstance(simulation.scheduler, Scheduler):
                check(simulation.scheduler)
            for event in step.events if step else ():
                if event.finish_reason is not None:
                    assert event.finish_reason is FinishReason.STOP
                    lengths[event.request.id] = len(event.request.output_tokens)
        assert lengths == {f"r{number}": one.answer for number, one in enumerate(arrivals)}
        assert simulation.scheduler.cache.usage.referenced == 0
        outcome = simulation.outcome()
        assert outcome.tokens == sum(one.answer for one in arrivals)
        assert outcome.prompt_tokens == sum(len(one.prompt) for one in arrivals)

    def test_a_small_pool_preempts_and_loses_nothing(self) -> None:
        outcome = simulate(TRACE.arrivals(), replace(SMALL, pages=40, prefix_cache=False))
        assert outcome.preemptions > 0
        assert outcome.prefill_tokens > outcome.prompt_tokens
        assert (outcome.requests, outcome.failed) == (120, 0)
        assert outcome.tokens == sum(one.answer for one in TRACE.arrivals())

    def test_a_prefix_cache_saves_most_of_a_chats_prefill(self) -> None:
        chat = replace(TRACE, kind="chat", rate=50.0)
        shared, plain = (simulate(chat.arrivals(), replace(SMALL, pages=4096, prefix_cache=on)) for on in (True, False))
        assert plain.prefill_tokens == plain.prompt_tokens == shared.prompt_tokens
        assert shared.prefill_tokens < 0.4 * plain.prefill_tokens

    def test_a_full_queue_refuses_requests(self) -> None:
        outcome = simulate(TRACE.arrivals(), replace(SMALL, queue_limit=2, max_running=4))
        assert outcome.refused > 0
        assert outcome.requests + outcome.refused == 120
        assert outcome.attainment <= outcome.requests / 120

    def test_a_request_that_can_never_be_served_is_refused(self) -> None:
        arrivals = [at(0.0, 30, 2, 7), at(0.0, 3, 2, 8)]
        outcome = simulate(arrivals, replace(SMALL, pages=4, page_size=4))
        assert (outcome.requests, outcome.refused) == (1, 1)

    def test_memory_does_not_grow_with_the_requests_that_have_ended(self) -> None:
        """Memory after 100 requests and after 400, at a rate that can be served."""
        trace = replace(TRACE, requests=400, rate=300.0, prompt=20, answer=6)
        simulation = Simulation(trace.arrivals(), SMALL)
        used = []
        tracemalloc.start()
        for ended in (100, 400):
            while simulation.going and simulation.stats.ended < ended:
                simulation.step()
            used.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert simulation.outcome().requests == 400
        assert simulation.runner.answers == {}
        assert used[1] < used[0] + 100_000

    def test_continuous_batching_serves_a_long_tail_sooner_than_static(self) -> None:
        trace = replace(TRACE, kind="batch", requests=200, prompt=20)
        static, continuous = (simulate(trace.arrivals(), replace(SMALL, way=way)) for way in ("static", "fcfs"))
        assert continuous.tokens_per_second > 1.5 * static.tokens_per_second
        assert continuous.ttft_p99 < static.ttft_p99

    def test_figures_match_the_requests(self) -> None:
        """Against the exact percentiles of phase 0, over all requests of the simulation."""
        slo = SLO(ttft=0.0005)
        simulation, requests = Simulation(TRACE.arrivals(), SMALL, slo), list[Request]()
        while simulation.going:
            step = simulation.step()
            requests += [event.request for event in (step.events if step else ()) if event.finish_reason]
        outcome = simulation.outcome()
        gaps = [gap for request in requests for gap in request.times.itl]
        ttft = [request.times.ttft or 0.0 for request in requests]
        for found, values, q in (
            (outcome.ttft_p50, ttft, 50),
            (outcome.ttft_p99, ttft, 99),
            (outcome.itl_p50, gaps, 50),
            (outcome.itl_p99, gaps, 99),
        ):
            assert found == pytest.approx(percentile(values, q), rel=0.05)
        assert outcome.queue_max == max(request.times.queue_time or 0.0 for request in requests)
        met = sum(slo.met(request) for request in requests)
        assert 0 < met < len(requests) == 120
        assert outcome.attainment == met / 120
        assert outcome.goodput == pytest.approx(met / max(request.arrival for request in requests))


class TestTheCommand:
    def test_it_prints_one_row_for_each_way_and_writes_figures(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "100")
        file = tmp_path / "figures.json"
        options = ["-n", "40", "--model", "17m", "--device", "L4", "--rate", "300", "--json", str(file)]
        main([*options, "--ways", "static", "fcfs"])
        printed = capsys.readouterr().out
        assert [line.split()[0] for line in printed.splitlines() if line[:4] in ("stat", "fcfs")] == ["static", "fcfs"]
        result = json.loads(file.read_text())
        wanted = "--ways static fcfs --model 17m --device L4 --requests 40 --rate 300.0"
        assert result["command"] == f"python -m phase5_continuous.lab simulator {wanted}"
        assert result["figures"]["ways"]["fcfs"]["requests"] == 40

    def test_it_takes_arrivals_from_a_file(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = tmp_path / "trace.json"
        file.write_text(json.dumps([{"time": 0, "prompt": 30, "answer": 20}, {"time": 1, "prompt": 3, "answer": 2}]))
        main(["--trace", str(file), "--ways", "fcfs"])
        assert "100%" in capsys.readouterr().out

    def test_the_figures_record_the_trace_file(self, tmp_path: Path) -> None:
        file, figures = tmp_path / "mine.json", tmp_path / "figures.json"
        file.write_text(json.dumps([{"time": 0, "prompt": 30, "answer": 20}]))
        main(["--trace", str(file), "--ways", "fcfs", "--json", str(figures)])
        result = json.loads(figures.read_text())
        assert result["figures"]["trace"] == {"file": "mine.json", "requests": 1}
        assert result["command"] == "python -m phase5_continuous.lab simulator --ways fcfs --trace mine.json"

    @pytest.mark.parametrize("option", ["--rate=7", "--rate=30", "--seed=0", "--max-prompt=9", "--kind=chat"])
    def test_a_trace_file_excludes_options_for_arrivals(
        self, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Also if the value is the default: the option would do nothing."""
        file = tmp_path / "trace.json"
        file.write_text(json.dumps([{"time": 0, "prompt": 30, "answer": 20}]))
        with pytest.raises(SystemExit) as stopped:
            main(["--trace", str(file), option])
        assert stopped.value.code == 2
        words = f"--trace has all arrivals; it goes without {option.partition('=')[0]}"
        assert words in capsys.readouterr().err

    def test_launches_cost_what_was_measured_for_the_model(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "host.json"
        file.write_text(json.dumps({"figures": {"17m_mixed": {"host_ms": {"median": 250.0}}}}))
        ttft = {}
        for name, options in (("without", []), ("with", ["--host-time", str(file)])):
            figures = tmp_path / name
            main([*options, "-n", "5", "--ways", "fcfs", "--model", "17m", "--json", str(figures)])
            ttft[name] = json.loads(figures.read_text())["figures"]["ways"]["fcfs"]["ttft_p50"]
        assert ttft["without"] < 0.25 <= ttft["with"]
        with pytest.raises(SystemExit):
            main(["-n", "5", "--model", "8b", "--host-time", str(file)])
        assert "has no mixed step of '8b'" in capsys.readouterr().err

    def test_preempted_refused_and_failed_requests_are_counted(self, capsys: pytest.CaptureFixture[str]) -> None:
        """In a table of their own, without columns of zeros."""
        main(["--ways", "fcfs", "-n", "60"])
        assert not {"preemptions", "refused", "failed"} & set(capsys.readouterr().out.split())
        main(["--ways", "static", "-n", "60", "--queue-limit", "1", "--kind", "batch"])
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert lines[-2:] == [["refused"], ["static", "59"]]
        main(["--ways", "whole", "fcfs", "-n", "60", "--pages", "12"])
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert lines[-3] == ["preemptions", "refused", "failed"]
        assert min(int(number) for line in lines[-2:] for number in line[1:]) > 0

    def test_its_tables_fit_eighty_columns(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also with ten thousand tokens a second and waits of a minute."""
        monkeypatch.setenv("COLUMNS", "80")
        outcome = simulate(islice(TRACE.arrivals(), 3), SMALL)
        rates = replace(outcome, tokens_per_second=16_632.0, goodput=13.9, attainment=0.16, preemptions=41)
        large = replace(rates, ttft_p50=36.966, ttft_p99=75.944, itl_p50=0.0054, itl_p99=0.0257, queue_max=77.09)
        monkeypatch.setattr(simulator, "compare", lambda *_: dict.fromkeys(WAYS, large))
        main([])
        shown = capsys.readouterr().out
        assert shown.count("16,632") == shown.count("77,090") == len(WAYS)
        assert "\u2026" not in shown

    def test_ctrl_c_leaves_a_clean_terminal(self) -> None:
        command = (sys.executable, "-m", "phase5_continuous.lab", "simulator", "-n", "1000000")
        status, seen = on_a_terminal(*command, until=b"static")
        assert status == 130
        assert after_the_view(seen).endswith(b"Stopped.\r\n")
        assert b"Traceback" not in seen

    @pytest.mark.parametrize(
        ("option", "words"),
        [
            ("--rate=0", "rate must be above 0 and finite, got 0.0"),
            ("--pages=0", "num_pages must be an integer from 1, got 0"),
            ("--budget=1", "max_batched_tokens must be at least 2"),
            ("--max-running=0", "must be an integer from 1, got 0"),
            ("--trace=nowhere.json", "No such file"),
            ("--ttft=nan", "ttft must be a number of seconds above 0, got nan"),
            ("--gap=-1", "gap must be a number of seconds above 0, got -1.0"),
        ],
    )
    def test_bad_options_are_named(self, option: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as stopped:
            main([option] if option.startswith("--trace") else ["-n", "5", option])
        assert stopped.value.code == 2
        assert words in capsys.readouterr().err

    def test_it_loads_no_torch(self) -> None:
        program = (
            "import sys\nfrom phase5_continuous.lab.simulator import main\nmain(['-n', '20', '--ways', 'fcfs'])\n"
            "assert 'torch' not in sys.modules"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")


def test_an_outcome_survives_json() -> None:
    outcome = simulate(islice(TRACE.arrivals(), 3), SMALL)
    assert json.loads(json.dumps(asdict(outcome), allow_nan=False)) == asdict(outcome)
