"""The processes of a model that is split: one that dies or hangs ends the engine in order, at any moment."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import psutil
import pytest

from phase0_request.params import SamplingParams
from phase0_request.support.checks import ConfigError
from phase2_prefill_decode.extras.parallel.ranks import WORKER, RankError
from phase6_integration.engine.engine import NanoServingEngine
from tests.phase6_integration.life import PATIENCE, Life, gone, life, stream

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
FLAGS = "--dtype", "float32", "--threads", "1", "--kv-cache-pages", "256", "--max-num-batched-tokens", "16"
KILLED = "rank 1 of 2 was killed by SIGKILL"


def workers(parent: int) -> list[int]:
    """The ranks that an engine process has started."""
    return [child.pid for child in psutil.Process(parent).children() if WORKER in child.cmdline()]


def until(what: Any) -> Any:
    """Wait until something is there."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with contextlib.suppress(psutil.NoSuchProcess, httpx2.TransportError):
            if found := what():
                return found
        time.sleep(0.01)
    raise AssertionError("it did not happen")


def test_an_engine_over_two_processes_answers_as_one_and_says_which_has_died() -> None:
    prompts = ["A KV cache keeps", "Paging"]
    with NanoServingEngine.from_pretrained(dtype="float32", kv_cache_pages=64) as alone:
        wanted = [answer.output_tokens for answer in alone.generate(prompts, GREEDY, progress=False)]
    with NanoServingEngine.from_pretrained(dtype="float32", kv_cache_pages=64, tensor_parallel_size=2) as together:
        assert [answer.output_tokens for answer in together.generate(prompts, GREEDY, progress=False)] == wanted
        (worker,) = workers(os.getpid())
        os.kill(worker, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(RankError, match=KILLED):
                together.generate(prompts, GREEDY, progress=False)
    assert workers(os.getpid()) == []


def test_a_split_model_that_no_engine_can_be_made_of_leaves_no_process() -> None:
    with pytest.raises(ConfigError) as caught:  # which keeps all frames, and so the model
        NanoServingEngine.from_pretrained(tensor_parallel_size=2, kv_cache_pages=2, max_model_len=2048)
    assert workers(os.getpid()) == []
    assert "max_model_len is 2048" in str(caught.value)


# Over HTTP. Each fault is followed by a restart, and by the same answer as before.


class Served:
    """A server of two ranks."""

    def __init__(self, server: Life) -> None:
        self.server = server
        self.url = server.listening()
        server.until("ready")
        self.answer = self.ask()

    def ask(self) -> str:
        body = {"prompt": [5, 6, 7], "max_tokens": 16, "temperature": 0}
        text: str = httpx2.post(f"{self.url}/v1/completions", json=body, timeout=PATIENCE).json()["choices"][0]["text"]
        return text

    def pids(self) -> tuple[int, int]:
        (engine,) = self.server.engines()
        (worker,) = workers(engine)
        return engine, worker

    @contextlib.contextmanager
    def fault(self, number: int, said: str) -> Iterator[None]:
        """Signal the worker at the end of the block. Both processes end, the log says why, and others take over."""
        engine, worker = until(self.pids)
        yield
        os.kill(worker, number)
        self.server.until(f"the engine is dead: {said}")
        assert until(lambda: gone(engine) and gone(worker))
        until(lambda: httpx2.get(f"{self.url}/health").status_code == 200)
        assert self.ask() == self.answer


@pytest.mark.slow
def test_a_rank_that_dies_or_hangs_at_any_stage_of_a_request_is_replaced_with_its_engine() -> None:
    long: dict[str, Any] = {"max_tokens": 1900, "temperature": 0, "ignore_eos": True}
    with life(*FLAGS, "-tp", "2", "--hang-timeout", "6", "--max-engine-restarts", "9") as server:
        served = Served(server)
        with served.fault(signal.SIGKILL, KILLED):
            pass  # idle
        for number, said in ((signal.SIGKILL, KILLED), (signal.SIGSTOP, "rank 1 of 2 did not take part in a step")):
            with httpx2.Client(timeout=PATIENCE) as http:
                with served.fault(number, said):  # decode
                    events = stream(http, served.url, **long)
                    next(events)
                *_, last, _ = events
                assert '"code":"dead"' in last.replace(" ", "")
        with httpx2.Client(timeout=PATIENCE) as http:
            with served.fault(signal.SIGKILL, KILLED):  # prefill, or soon after
                request = http.build_request(
                    "POST", f"{served.url}/v1/completions", json={"prompt": [5] * 1500, "max_tokens": 9, "stream": True}
                )
                response = http.send(request, stream=True)
                until(lambda: httpx2.get(f"{served.url}/stats").json()["pages"]["used"])
            assert "dead" in response.read().decode()
        _, worker = served.pids()
        server.signal(signal.SIGTERM)
        assert server.ended() == 0
        assert until(lambda: gone(worker))


@pytest.mark.slow
def test_a_rank_that_dies_while_it_loads_ends_the_server_with_its_reason() -> None:
    with life(*FLAGS, "-tp", "2") as server:
        (engine,) = until(server.engines)
        (worker,) = until(lambda: workers(engine))
        os.kill(worker, signal.SIGKILL)
        assert server.ended() == 1
        assert any(KILLED in line for line in server.lines)
        assert until(lambda: gone(engine))
