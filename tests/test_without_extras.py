"""The core by itself, in a copy without any folder `extras`: each phase still does its work, and the server streams."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import httpx2
import pytest

ROOT = Path(__file__).parents[1]
SIX = "phase6_integration"
LEFT_OUT = ("extras", "lab", "__pycache__")
PROMPTS = [[5, 6, 7, 8, 9], list(range(20, 60)), [300, 301, 302]]
LENGTH = 12

# The loop of phase 0 over integers: the token behind n is n + 1.
LOOP = """
from types import SimpleNamespace
from phase0_request.batch import Batch, Slice, StepOutput
from phase0_request.core import EngineCore
from phase0_request.params import SamplingParams
from phase0_request.request import Request, RequestState
from phase0_request.scheduler import BaseScheduler

class All(BaseScheduler):
    def _enqueue(self, sequence, again=False):
        pass
    def plan(self, now):
        running = [sequence.request for sequence in self.sequences if not sequence.request.finished]
        for request in running:
            if request.state is RequestState.WAITING:
                request.admit(now)
        return Batch(tuple(Slice(r, r.computed, r.total - r.computed) for r in running))
    def _remove(self, sequence):
        pass
    def _clear(self):
        pass

class Counter:
    def pack(self, batch):
        return batch
    def launch(self, batch):
        tokens = [part.request.tokens(part.stop - 1, part.stop)[0] + 1 for part in batch]
        return SimpleNamespace(output=lambda: StepOutput(tokens))

core = EngineCore(All(), Counter())
requests = [Request(f"{n}", (n, n + 1), SamplingParams(max_tokens=3)) for n in (5, 50)]
for request in requests:
    core.submit(request)
for step in core.run():
    pass
print([request.output_tokens for request in requests])
"""

# Pages of phase 1: what is stored for a request is read back in order.
PAGES = """
import torch
from phase0_request.batch import Slice
from phase0_request.request import Request
from phase1_kv_pool.cache import PagedCache
from phase1_kv_pool.kernels.store import store
from phase1_kv_pool.layout import KVLayout
from phase1_kv_pool.pool import KVPool

cache, request = PagedCache(8, 4), Request("a", tuple(range(10)))
pool = KVPool(KVLayout(1, 2, 16, 4, "float32"), 8)
cache.attach(request)
cache.grow(request, 10)
k, v = torch.randn(2, 10, 2, 16)
(layer,) = pool.layers
store(layer, torch.tensor(cache.slots(Slice(request, 0, 10))), k, v)
found = layer.gather(torch.tensor(cache.table(request)), 10)
print(bool((found[0] == k).all() and (found[1] == v).all()))
"""

ENGINES = {
    "phase2_prefill_decode": "from phase2_prefill_decode.engine import static; engine = static(model)",
    "phase3_chunked_prefill": "from phase3_chunked_prefill.engine import chunked; engine = chunked(model)",
    "phase4_radix": "from phase4_radix.engine import cached; engine = cached(model)",
    "phase5_continuous": "from phase5_continuous.engine import continuous; engine = continuous(model)",
    SIX: f"from {SIX}.engine.engine import NanoServingEngine; engine = NanoServingEngine.from_pretrained("
    "dtype='float32', kv_cache_pages=64)",
}
MAKE = f"""
import json
from phase0_request.params import SamplingParams
from phase2_prefill_decode.model import Model
model, found = Model.load(dtype="float32", device="cpu"), {{}}
for phase, make in {ENGINES}.items():
    exec(make)
    done = engine.generate({PROMPTS}, SamplingParams(max_tokens={LENGTH}, temperature=0, ignore_eos=True))
    found[phase] = [list(completion.output_tokens) for completion in done]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The phases without extras and labs, as links to their files."""
    folder = tmp_path_factory.mktemp("core")
    for phase in ROOT.glob("phase[0-6]_*"):
        ignore = shutil.ignore_patterns(*LEFT_OUT)
        shutil.copytree(phase, folder / phase.name, ignore=ignore, copy_function=os.symlink)
    assert not [*folder.rglob("extras")]
    return folder


@cache
def environment(core: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "NANOSERVE"))}
    return kept | {"PYTHONPATH": str(core), "PYTHONSAFEPATH": "1"}


def run(core: Path, *command: str) -> str:
    done = subprocess.run([sys.executable, *command], cwd=core, env=environment(core), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or done.stdout[-4000:]
    return done.stdout.strip()


def test_requests_are_served_and_pages_hold_what_is_stored(core: Path) -> None:
    assert run(core, "-c", LOOP + PAGES).splitlines() == ["[[7, 8, 9], [52, 53, 54]]", "True"]


def oracle() -> list[list[int]]:
    """What transformers generates."""
    import torch
    from transformers import AutoModelForCausalLM

    from phase0_request.tokenizer import BUNDLED

    model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).eval()
    outputs = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(LENGTH):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        outputs.append(tokens[len(prompt) :])
    return outputs


def test_each_phase_generates_what_transformers_does(core: Path) -> None:
    assert json.loads(run(core, "-c", MAKE)) == dict.fromkeys(ENGINES, oracle())


@contextlib.contextmanager
def served(core: Path) -> Iterator[str]:
    """The address of `nanoserve serve`, which ends by SIGTERM."""
    flags = ("--port", "0", "--kv-cache-pages", "64", "--threads", "1")
    command = [sys.executable, "-m", f"{SIX}.cli", "serve", *flags]
    with subprocess.Popen(command, cwd=core, env=environment(core), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = []
        try:
            for line in process.stderr:
                said.append(line)
                if "ready" in line and "http://" in line:
                    yield next(word for word in line.replace("=", " ").split() if word.startswith("http://"))
                    break
            else:
                raise AssertionError("".join(said))
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate()
    assert process.returncode == 0, "".join(said)


def test_the_server_streams_a_chat_and_aborts_one(core: Path) -> None:
    body = {"messages": [{"role": "user", "content": "What is a page?"}], "stream": True, "max_tokens": 16}
    with served(core) as url, httpx2.Client(base_url=url, timeout=60) as http:
        with http.stream("POST", "/v1/chat/completions", json=body) as response:
            *chunks, last = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert last == "[DONE]"
        words = "".join(json.loads(chunk)["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert len(words.split()) > 3
        with http.stream("POST", "/v1/chat/completions", json=body | {"max_tokens": 900}) as response:
            next(response.iter_lines())  # and leaves: the engine gets the pages back, and ends when it is told
        for field in ({"logprobs": True}, {"response_format": {"type": "json_object"}}, {"tools": []}):
            error = http.post("/v1/chat/completions", json=body | field).json()["error"]
            assert (error["param"], error["code"]) == (next(iter(field)), "unknown_field")
            assert "phase6_integration/extras, which has more of them, is not here" in error["message"]
        assert http.get("/v1/models", headers={"host": "evil.example"}).status_code == 400
        large = http.post("/v1/chat/completions", content=b" " * (4 << 20) + b" ")
        assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")


def test_a_setting_that_needs_an_extra_is_refused(core: Path) -> None:
    command = [sys.executable, "-m", f"{SIX}.cli", "serve", "--port", "0", "--api-key", "secret"]
    done = subprocess.run(command, cwd=core, env=environment(core), capture_output=True, text=True)
    assert done.returncode == 2
    absent = "phase2_prefill_decode/extras, phase5_continuous/extras, phase6_integration/extras"
    assert done.stderr == f"nanoserve serve: no such flag: --api-key; it may need {absent}, which is not here\n"
    command, keys = command[:-2], environment(core) | {"NANOSERVE_API_KEY": "secret"}
    done = subprocess.run(command, cwd=core, env=keys, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "nanoserve serve: NANOSERVE_API_KEY needs phase6_integration/extras, which is not here\n"


# Of phase 6 alone, while the other phases need theirs.

TAKEN_OFF = "extras", "app.py", "serve.py", "cli", "load", "lab", "adversarial", "__pycache__"  # and what needs extras


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository in which phase 6 has no extras."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "tests").mkdir()
    for place in (*ROOT.glob("phase[0-5]_*"), *ROOT.glob("tests/phase[0-5]_*"), ROOT / "tests/conftest.py"):
        (folder / place.relative_to(ROOT)).symlink_to(place)
    shutil.copy(ROOT / "pyproject.toml", folder)
    for place in (SIX, f"tests/{SIX}"):
        shutil.copytree(ROOT / place, folder / place, ignore=shutil.ignore_patterns(*TAKEN_OFF))
    return folder


@pytest.mark.slow  # they run a second time
@pytest.mark.parametrize("part", ["engine", "process", "api"])
def test_the_tests_of_the_core_pass_without_the_extras_of_the_server(server: Path, part: str) -> None:
    options = ("-q", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:randomly")
    assert " passed" in run(server, "-m", "pytest", *options, f"tests/{SIX}/{part}")
