"""EngineOptions: the settings of an engine, checked once, before anything is loaded.

Each field carries its check and the help text of its command-line flag: `engine.flags.add_fields` builds the flags.
"""

import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from phase0_request.support.checks import ConfigError, check_bool, check_choice, check_int, check_number, invalid
from phase0_request.tokenizer import BUNDLED
from phase1_kv_pool.layout import DTYPE_BYTES, KV_DTYPES
from phase2_prefill_decode.connect import check_quantization
from phase3_chunked_prefill.budget import TokenBudget
from phase5_continuous.connect import check_speculation
from phase5_continuous.policies import POLICIES

MAX_INT = 1 << 30
MAX_CONTEXT = 1 << 17  # tokens, unless max_model_len is set: a few bytes of a config.json can claim any length
AUTO = {"auto": None}  # None means: chosen from the model and the machine
Check = Callable[[str, Any], object]  # (name, value); raises ValueError


def option(
    default: Any,
    help: str,
    metavar: str = "N",
    check: Check | None = None,
    flags: tuple[str, ...] = (),
    words: Mapping[str, object] | None = None,
) -> Any:
    """A dataclass field with its check and its command-line flag. A function as default makes a new one each time;
    `flags` replaces the flag made from the name; `words` are other values of it, with those that they stand for."""
    more = {"help": help, "metavar": metavar, "check": check, "flags": flags, "words": words or {}}
    return field(default_factory=default, metadata=more) if callable(default) else field(default=default, metadata=more)


def check_fields(options: Any, name: str = "") -> None:
    """Run the check of every field of a dataclass, which `name` stands before in errors. None is allowed where it is
    the default."""
    for option in fields(options):
        value, check = getattr(options, option.name), option.metadata.get("check")
        if check is not None and not (value is None and option.default is None):
            check(name + option.name, value)


def text(what: str, pattern: str = "(?s).+") -> Check:
    """A check for a string that matches a pattern; `what` says what it must be."""

    def check(name: str, value: object) -> None:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise invalid(name, what, value)

    return check


def texts(what: str, pattern: str) -> Check:
    """A check for strings that match a pattern."""

    def check(name: str, values: Iterable[str]) -> None:
        if not all(re.fullmatch(pattern, value) for value in values):
            raise ConfigError(f"{name} must be {what}")

    return check


def at_least(low: int) -> Check:
    return partial(check_int, low=low, high=MAX_INT)


positive: Check = partial(check_number, low=0, above=True)
_endpoint = text("an address such as tcp://127.0.0.1:5557 or ipc:///run/events", "(tcp|ipc)://.+")
_model = text("a directory, a GGUF file or the name of a repository")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """The keys of `--kv-events-config`, which are those of vLLM."""

    enable_kv_cache_events: bool = option(True, "", check=check_bool)
    publisher: str = option("zmq", "", check=partial(check_choice, allowed=("zmq",)))
    endpoint: str = option("tcp://127.0.0.1:5557", "", check=_endpoint)
    replay_endpoint: str | None = option(None, "", check=_endpoint)
    topic: str = option("", "", check=text("a string", "(?s).*"))
    buffer_steps: int = option(10_000, "", check=at_least(1))  # newest messages that can be asked for again
    hwm: int = option(100_000, "", check=at_least(1))  # messages that wait for a slow subscriber

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "KVEventsConfig":
        """ValueError names what is wrong with it."""
        known = [field.name for field in fields(cls)]
        if unknown := given.keys() - known:
            raise invalid("kv_events_config", f"of the keys {', '.join(known)}", ", ".join(unknown))
        config = cls(**given)
        check_fields(config, "kv_events_config: ")
        if config.enable_kv_cache_events and importlib.util.find_spec("zmq") is None:
            raise ConfigError("kv_events_config needs pyzmq: pip install 'nano-serving[cluster]'")
        return config


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The settings of an engine. None means: chosen from the model and the machine."""

    model: str = field(default=str(BUNDLED), metadata={"check": _model})  # a directory, a GGUF file, a repository
    revision: str | None = option(
        None, "branch, tag or commit of a repository on the hub (main)", "REVISION", text("a branch, a tag or a commit")
    )
    download_dir: str | None = option(
        None, "for downloads from the hub (the hub's own cache)", "DIRECTORY", text("a directory")
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
    quantization: str | None = option(
        None,
        "int8, int4 or fp8: quantize the matrices of the layers when they are loaded (as they were saved)",
        "SCHEME",
        check_quantization,
        words={"none": None},
    )
    quantize_embeddings: bool = option(False, "with --quantization: the embedding and lm_head too", check=check_bool)
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
    tensor_parallel_size: int = option(
        1,
        "split the model over so many processes, on a GPU each or on the cores of the CPU",
        check=partial(check_int, low=1, high=64),
        flags=("--tensor-parallel-size", "-tp"),
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
    speculative_config: Mapping[str, Any] | None = option(
        None,
        'draft tokens by ngram, suffix or draft_model, and verify them in one step: {"method": "ngram", '
        '"num_speculative_tokens": 7} (none)',
        "JSON",
        check_speculation,
    )
    kv_events_config: Mapping[str, Any] | None = option(
        None,
        'tell routers over ZeroMQ what is cached, with the keys of vLLM: {"endpoint": "tcp://127.0.0.1:5557", '
        '"replay_endpoint": "tcp://127.0.0.1:5558"} (none)',
        "JSON",
        lambda name, value: KVEventsConfig.of(value),
    )
    enforce_eager: bool = option(False, "launch kernels one by one, without CUDA graphs", check=check_bool)
    enable_piecewise_cuda_graph: bool = option(
        False, "record steps with prompts too, in pieces: for small models on a GPU", check=check_bool
    )
    check_invariants: bool = option(False, "check the scheduler's invariants after every step; slow", check=check_bool)
    load_timeout: float = option(600.0, "an engine may take to load its model", "SECONDS", positive)
    hang_timeout: float = option(300.0, "of silence before a busy engine counts as hung", "SECONDS", positive)
    heartbeat_timeout: float = option(15.0, "an idle engine may take to answer a ping", "SECONDS", positive)
    max_engine_restarts: int = option(
        3, "restarts in a row of an engine that fails; then the server ends", check=at_least(0)
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.quantize_embeddings and self.quantization is None:
            raise ConfigError("quantize_embeddings is for quantization, which is not set")
        if not self.enable_chunked_prefill and self.max_chunk_size is not None:
            raise ConfigError("max_chunk_size is for chunked prefill, which enable_chunked_prefill=False turns off")
        if self.tensor_parallel_size > 1 and self.device is not None and ":" in self.device:
            raise ConfigError(
                f"tensor_parallel_size={self.tensor_parallel_size} takes the first GPUs: device must be cuda or cpu, "
                f"got {self.device}"
            )
        if self.enable_piecewise_cuda_graph and (self.enforce_eager or self.tensor_parallel_size > 1):
            raise ConfigError(
                "enable_piecewise_cuda_graph records steps, of a model on one device: it goes neither with "
                "enforce_eager nor with tensor_parallel_size"
            )
        if self.kv_events and not self.enable_prefix_caching:
            raise ConfigError("kv_events_config is for prefix caching, which enable_prefix_caching=False turns off")
        if self.speculative_config is not None and self.async_scheduling:
            raise ConfigError("async_scheduling launches a step before the tokens are known that a draft would follow")

    @property
    def kv_events(self) -> KVEventsConfig | None:
        """How KV events are published, if they are."""
        config = None if self.kv_events_config is None else KVEventsConfig.of(self.kv_events_config)
        return config if config and config.enable_kv_cache_events else None

    @property
    def queued_per_client(self) -> int:
        """The most requests of one client that may wait. Some places are left to others, whatever it sends."""
        return (self.max_num_queued_reqs + 1) // 2

    def context(self, claimed: int) -> int:
        """The context length to serve of a model that claims so many tokens, if the KV cache has room for it."""
        return min(claimed, MAX_CONTEXT) if self.max_model_len is None else self.max_model_len

    def running(self, on_gpu: bool) -> int:
        """The most requests in a step."""
        return self.max_num_seqs or (256 if on_gpu else 64)

    def ahead(self, on_gpu: bool) -> int:
        """How many steps may be launched before the oldest one has been read. A CPU computes while it launches: there,
        running ahead would only delay the tokens."""
        wanted = on_gpu and self.speculative_config is None
        return int(wanted if self.async_scheduling is None else self.async_scheduling)

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
