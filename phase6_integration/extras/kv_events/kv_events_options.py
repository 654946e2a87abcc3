"""The option of KV events, and its keys."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from importlib.util import find_spec
from typing import Any

from phase0_request.support.checks import ConfigError, check_bool, check_choice, invalid
from phase0_request.support.options import at_least, check_fields, option, text

_endpoint = text("an address such as tcp://127.0.0.1:5557 or ipc:///run/events", "(tcp|ipc)://.+")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """The keys of `--kv-events-config`, the same as vLLM's."""

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
        if config.enable_kv_cache_events and find_spec("zmq") is None:
            raise ConfigError("kv_events_config needs pyzmq: pip install 'nano-serving[cluster]'")
        return config


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsOptions:
    kv_events_config: Mapping[str, Any] | None = option(
        None,
        'tell routers over ZeroMQ what is cached, with the keys of vLLM: {"endpoint": "tcp://127.0.0.1:5557", '
        '"replay_endpoint": "tcp://127.0.0.1:5558"} (none)',
        "JSON",
        lambda _, value: KVEventsConfig.of(value),
    )

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def kv_events(self) -> KVEventsConfig | None:
        """How KV events are published, if they are."""
        config = None if self.kv_events_config is None else KVEventsConfig.of(self.kv_events_config)
        return config if config and config.enable_kv_cache_events else None
