"""EngineOptions: what an engine is told before it loads anything. Checked here, once; nothing of it changes after."""

import re
from dataclasses import dataclass

from phase0_request.tokenizer import BUNDLED
from phase2_prefill_decode.fields import ConfigError, flag, integer, number, one_of
from phase3_chunked_prefill.budget import TokenBudget
from phase5_continuous.policies import POLICIES

DTYPES = ("float32", "bfloat16", "float16")
DEVICE = re.compile(r"cpu|cuda(:\d+)?")
MOST = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """None is: what suits the model and the machine."""

    model: str = str(BUNDLED)  # a directory in Hugging Face layout, or the name of a repository there
    dtype: str | None = None  # None: as the weights were saved
    device: str | None = None  # None: a GPU if there is one
    max_model_len: int | None = None  # tokens of a prompt and its answer together
    max_num_seqs: int | None = None  # requests that run at once; None: 256 on a GPU, 64 on a CPU
    max_num_batched_tokens: int | None = None  # tokens of a step; None: 2,048 on a GPU, 512 on a CPU
    max_chunk_size: int | None = None  # tokens of one prompt in a step; None: as many as the step has
    page_size: int = 16
    kv_cache_pages: int | None = None  # None: what fits into memory
    gpu_memory_utilization: float = 0.9  # of the device's memory, for weights, activations and pages together
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduling_policy: str = "fcfs"
    max_num_queued_reqs: int = 2048  # requests that may wait in a server; one more is refused
    request_timeout: float | None = None  # seconds from arrival to the end
    seed: int | None = None  # for requests that bring none
    threads: int | None = None  # of the processor; None: as many as torch takes, or in a server what `threads.py` says
    enforce_eager: bool = True  # steps are launched kernel by kernel; there is no other way yet
    check_invariants: bool = False  # after every step; slow
    hang_timeout: float = 300.0  # seconds without a word from an engine that has work, and it counts as hung

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model must be a directory or the name of a repository, got {self.model!r}")
        if self.dtype is not None:
            one_of("dtype", self.dtype, DTYPES)
        if self.device is not None and not (isinstance(self.device, str) and DEVICE.fullmatch(self.device)):
            raise ConfigError(f"device must be cpu, cuda or cuda:N, got {self.device!r}")
        for name in ("max_model_len", "max_num_seqs", "max_chunk_size", "kv_cache_pages"):
            if getattr(self, name) is not None:
                integer(name, getattr(self, name), 1, MOST)
        if self.max_num_batched_tokens is not None:
            integer("max_num_batched_tokens", self.max_num_batched_tokens, 2, MOST)
        if self.threads is not None:
            integer("threads", self.threads, 1, 1024)
        integer("max_num_queued_reqs", self.max_num_queued_reqs, 1, MOST)
        integer("page_size", self.page_size, 1, 1024)
        number("gpu_memory_utilization", self.gpu_memory_utilization, 0, open_below=True)
        if self.gpu_memory_utilization > 1:
            raise ConfigError(f"gpu_memory_utilization must be at most 1, got {self.gpu_memory_utilization!r}")
        for name in ("enable_prefix_caching", "enable_chunked_prefill", "enforce_eager", "check_invariants"):
            flag(name, getattr(self, name))
        one_of("scheduling_policy", self.scheduling_policy, tuple(POLICIES))
        if self.request_timeout is not None:
            number("request_timeout", self.request_timeout, 0, open_below=True)
        number("hang_timeout", self.hang_timeout, 0, open_below=True)
        if not self.enforce_eager:
            raise ConfigError("enforce_eager must be true: this engine captures no graphs yet")
        if not self.enable_chunked_prefill and self.max_chunk_size is not None:
            raise ConfigError("max_chunk_size is for chunked prefill, which enable_chunked_prefill=False turns off")

    def batched_tokens(self, on_gpu: bool) -> int:
        return self.max_num_batched_tokens or (2048 if on_gpu else 512)

    def running(self, on_gpu: bool) -> int:
        return self.max_num_seqs or (256 if on_gpu else 64)

    def budget(self, on_gpu: bool, max_model_len: int) -> TokenBudget:
        """The tokens of a step. Without chunks a step must have room for the longest prompt, whole."""
        tokens = self.batched_tokens(on_gpu)
        if self.enable_chunked_prefill:
            return TokenBudget(min(self.max_chunk_size or tokens, tokens), tokens)
        if self.max_num_batched_tokens is not None and tokens < max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens must be at least max_model_len ({max_model_len}) when prompts are not cut, "
                f"got {tokens}"
            )
        tokens = max(tokens, max_model_len)
        return TokenBudget(tokens, tokens)
