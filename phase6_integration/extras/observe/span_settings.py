"""The setting of spans: where they are sent."""

from dataclasses import dataclass
from importlib.util import find_spec

from phase0_request.support.checks import ConfigError
from phase0_request.support.options import check_fields, option, text


def _collector(name: str, value: str) -> None:
    text("a URL such as http://127.0.0.1:4318/v1/traces", r"https?://\S+")(name, value)
    if find_spec("opentelemetry.sdk") is None:
        raise ConfigError(f"{name} needs OpenTelemetry's SDK: pip install 'nano-serving[otel]'")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanSettings:
    otlp_traces_endpoint: str | None = option(
        None,
        "of a collector, such as http://127.0.0.1:4318/v1/traces: a span for each request (none)",
        "URL",
        _collector,
    )

    def __post_init__(self) -> None:
        check_fields(self)
