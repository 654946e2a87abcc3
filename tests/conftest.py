"""The same examples on every run and no deadlines: a failure here is never a matter of luck or of load."""

import os

from hypothesis import settings

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

settings.register_profile("house", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("house")
