"""The same examples on every run, no deadlines, no colours or widths from the environment: a failure here is never a
matter of luck, of load or of who runs it."""

import os
import signal

from hypothesis import settings

from phase1_kv_pool.kernels import prepare_triton

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "COLUMNS", "LINES"):
    os.environ.pop(name, None)

# A run in the background is born deaf to Ctrl-C, and would hand that on to the commands that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

prepare_triton()  # before any test module can import Triton, which looks at the environment when it is imported

settings.register_profile("house", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("house")
