"""The same examples on every run, no deadlines, no colours or widths from the environment: a failure here is never a
matter of luck, of load or of the user."""

import gc
import os
import signal
import sys
from collections.abc import Generator
from importlib.util import find_spec

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before anything loads torch
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "COLUMNS", "LINES"):
    os.environ.pop(name, None)

# jsonschema would compile a grammar of IRIs, a second and a half for each process; no schema here has one.
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]

# Hundreds of processes are started here: each would compile the phases again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A run in the background is born deaf to Ctrl-C, and would hand that on to the commands that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("house", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("house")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What it makes, and all that it imports, lives to the end: the garbage collector never walks over it. Each
    `gc.collect()` of a test took a third of a second, and there are hundreds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The notebooks first: at the end, one worker would run them while the others have nothing left to do. Meanwhile
    phases 0 and 1, then the others, and the course last: what a cold machine compiles, it compiles once."""
    items.sort(key=lambda item: (item.path.name != "test_book.py", "chapters" in item.path.parts))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ahead", action="store_true", help="run the engines one step ahead, as on a GPU")
    parser.addoption("--drafts", action="store_true", help="run the engines with drafts, most of them wrong")


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module imports torch, which looks at the environment above, or Triton, which looks at this."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # its workers run the tests
    if find_spec("torch") is None:
        return  # in a browser's tab, which runs what needs no tensors
    from phase1_kv_pool.kernels import prepare_triton

    prepare_triton()
    compute_on_the_cpu()
    if config.getoption("--ahead"):
        run_ahead()
    if config.getoption("--drafts"):
        run_with_drafts()


def run_ahead() -> None:
    """Make running one step ahead the default of engines, in this process and in those that get its options."""
    from phase5_continuous.engine import continuous
    from phase6_integration.engine.options import EngineOptions

    continuous.__kwdefaults__["ahead"] = 1
    EngineOptions.__init__.__kwdefaults__["async_scheduling"] = True


def run_with_drafts() -> None:
    """Make speculation the default of engines, in this process and in those that get its options."""
    from phase5_continuous.engine import continuous
    from phase6_integration.engine.options import EngineOptions

    config = {"method": "ngram", "prompt_lookup_min": 1, "spare_rows": 64}
    continuous.__kwdefaults__["speculative_config"] = config
    EngineOptions.__init__.__kwdefaults__["speculative_config"] = config


def compute_on_the_cpu() -> None:
    """Make the CPU the default device, also on a machine with a GPU, where an engine takes 90 % of the memory: two do
    not fit beside each other. What tests a GPU is marked `gpu` and names it; Triton kernels are tested on it anyway."""
    import torch

    if torch.cuda.is_available():
        from phase2_prefill_decode import model

        torch.cuda.init()
        torch.cuda.device_count()  # torch keeps the number, and does not read the environment again
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # of the processes that tests start
        model.default_device = lambda: torch.device("cpu")  # before other modules import it
