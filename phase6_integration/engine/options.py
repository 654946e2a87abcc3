"""EngineOptions: the settings of an engine, checked once, before anything is loaded. Extras have their own."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from phase0_request.support.checks import ConfigError, check_bool, check_choice, check_int, check_number
from phase0_request.support.options import at_least, check_fields, chosen, option, positive, text
from phase0_request.tokenizer import BUNDLED
from phase1_kv_pool.layout import DTYPE_BYTES, KV_DTYPES
from phase3_chunked_prefill.budget import TokenBudget
from phase5_continuous.policies import POLICIES

MAX_CONTEXT = 1 << 17  # tokens, unless max_model_len is set: a few bytes of a config.json can claim any length
AUTO = {"auto": None}  # None means: chosen from the model and the machine
T = TypeVar("T")
_model = text("a directory, a GGUF file or the name of a repository")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The settings of an engine. None: chosen from the model and the machine."""

    model: str = field(default=str(BUNDLED), metadata={"check": _model})  # a directory, a GGUF file, a repository
    revision: str | None = option(
        None, "branch, tag or commit of a repository on the hub (main)", "REVISION", text("a branch, a tag or a commit")
    )
    download_dir: str | None = option(
        None,
        "for downloads (of the hub, its own cache; of a short name, NANOSERVE_CACHE or ~/.cache/nano-serving)",
        "DIRECTORY",
        text("a directory"),
    )
    tokenizer: str | None = option(
        None, "directory or name on the hub of the tokenizer and its chat template (the model's)", "TOKENIZER", _model
    )
    dtype: str | None = option(
        None,
        "float32 or float, bfloat16, float16 or half; auto: as the weights were saved (auto)",
        "DTYPE",
        partial(check_choice, allowed=tuple(DTYPE_BYTES)),
        words=AUTO | {"half": "float16", "float": "float32"},
    )
    kv_cache_dtype: str | None = option(
        None,
        "int8 or fp8: keys and values in 8 bits, for nearly twice the tokens; auto: in the model's dtype (auto)",
        "DTYPE",
        partial(check_choice, allowed=KV_DTYPES),
        words=AUTO,
    )
    device: str | None = option(
        None,
        "cpu, cuda or cuda:N; auto: a GPU if there is one (auto)",
        "DEVICE",
        text("cpu, cuda or cuda:N", r"cpu|cuda(:\d+)?"),
        words=AUTO,
    )
    max_model_len: int | None = option(
        None,
        "context length: tokens of prompt and answer together, such as 8192 or 8K; auto: all that the model takes, up "
        "to 128K, and the KV cache has room for (auto)",
        check=at_least(1),
        words=AUTO | {"-1": None},
    )
    max_num_seqs: int | None = option(None, "most requests in a step (256 on a GPU, 64 on a CPU)", check=at_least(1))
    max_num_batched_tokens: int | None = option(
        None, "token budget of a step (2048 on a GPU, 512 on a CPU)", check=at_least(2)
    )
    max_chunk_size: int | None = option(
        None, "most prompt tokens of one request in a step (the token budget)", check=at_least(1)
    )
    page_size: int = option(
        16,
        "tokens of a KV cache page",
        check=partial(check_int, low=1, high=1024),
        flags=("--page-size", "--block-size"),
    )
    kv_cache_pages: int | None = option(None, "pages of the KV cache (all that fit)", check=at_least(1))
    gpu_memory_utilization: float = option(
        0.9,
        "share of the device's memory for weights, activations and KV cache",
        "SHARE",
        partial(check_number, low=0, high=1, above=True),
    )
    enable_prefix_caching: bool = option(True, "reuse the KV cache of shared prefixes", check=check_bool)
    enable_chunked_prefill: bool = option(True, "split long prompts over several steps", check=check_bool)
    scheduling_policy: str = option(
        "fcfs",
        f"order of a client's waiting requests: {', '.join(POLICIES)}",
        "POLICY",
        partial(check_choice, allowed=tuple(POLICIES)),
    )
    max_num_queued_reqs: int = option(2048, "most waiting requests in a server; one more is a 429", check=at_least(1))
    seed: int | None = option(None, "sampling seed of requests without one (none)")
    threads: int | None = option(
        None,
        "CPU threads of a process (1 for a small model, else all cores)",
        check=partial(check_int, low=1, high=1024),
    )
    async_scheduling: bool | None = option(
        None, "launch a step before the one before it has been read (on a GPU)", check=check_bool
    )
    enforce_eager: bool = option(False, "launch kernels one by one, without CUDA graphs", check=check_bool)
    load_timeout: float = option(600.0, "an engine may take to load its model", "SECONDS", positive)
    hang_timeout: float = option(300.0, "of silence before a busy engine counts as hung", "SECONDS", positive)
    heartbeat_timeout: float = option(15.0, "an idle engine may take to answer a ping", "SECONDS", positive)
    max_engine_restarts: int = option(
        3, "restarts in a row of an engine that fails; then the server ends", check=at_least(0)
    )

    more: Mapping[str, Any] = field(default_factory=dict)  # options of extras: `engine_options` fills it

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.enable_chunked_prefill and self.max_chunk_size is not None:
            raise ConfigError("max_chunk_size is for chunked prefill, which enable_chunked_prefill=False turns off")

    def of(self, extra: type[T]) -> T:
        """The options of an extra, as its dataclass."""
        return chosen(extra, self.more)

    @property
    def queued_per_client(self) -> int:
        """The most requests of one client that may wait, so that others find places whatever it sends."""
        return (self.max_num_queued_reqs + 1) // 2

    def context(self, claimed: int) -> int:
        """The context length to serve, given the model's own, if the KV cache has room for it."""
        return min(claimed, MAX_CONTEXT) if self.max_model_len is None else self.max_model_len

    def running(self, on_gpu: bool) -> int:
        """The most requests in a step."""
        return self.max_num_seqs or (256 if on_gpu else 64)

    def ahead(self, on_gpu: bool) -> int:
        """How many steps may be launched before the oldest one has been read. A CPU computes while it launches: there,
        running ahead would only delay the tokens."""
        return int(on_gpu if self.async_scheduling is None else self.async_scheduling)

    def budget(self, on_gpu: bool, max_model_len: int) -> TokenBudget:
        """The token budget of a step. Without chunked prefill it must hold the longest prompt."""
        tokens = self.max_num_batched_tokens or (2048 if on_gpu else 512)
        if self.enable_chunked_prefill:
            return TokenBudget(min(self.max_chunk_size or tokens, tokens), tokens)
        if self.max_num_batched_tokens is not None and tokens < max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens must be at least max_model_len ({max_model_len}) when prompts are not cut, "
                f"got {tokens}"
            )
        tokens = max(tokens, max_model_len)
        return TokenBudget(tokens, tokens)
