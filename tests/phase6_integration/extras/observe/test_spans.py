"""Spans of OpenTelemetry, as a collector reads them: with the classes that OTLP's own definition makes."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx2
import pytest

from phase6_integration import connect
from phase6_integration.extras.observe import spans
from tests.phase6_integration.fake_engine import FakeEngine, client, served

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(HTTPServer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Receiver)
        self.bodies: list[tuple[str, bytes]] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"

    def spans(self) -> list[tuple[Any, Any]]:
        """Every span with its resource."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        spans.flush()
        sent = [ExportTraceServiceRequest.FromString(body) for path, body in self.bodies if path == "/v1/traces"]
        return [
            (span, part.resource)
            for request in sent
            for part in request.resource_spans
            for scope in part.scope_spans
            for span in scope.spans
        ]


class Receiver(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        self.server.bodies.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as one, ThreadPoolExecutor(1) as pool:
        pool.submit(one.serve_forever, 0.01)
        yield one
        one.shutdown()


def attributes(of: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in of.attributes}


def test_a_span_has_the_tokens_and_latencies_of_its_request_and_the_parent_that_the_client_names(
    collector: Collector,
) -> None:
    body = {"prompt": "A page", "max_tokens": 3, "n": 2, "stream": True}
    settings = connect.settings(otlp_traces_endpoint=collector.endpoint)
    with served(FakeEngine, settings) as url, httpx2.Client(base_url=url) as http:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "it"}
        assert http.post("/v1/completions", json=body, headers=headers).status_code == 200
        assert http.post("/v1/completions", json=body | {"max_tokens": -7}).status_code == 400
        assert http.get("/health").status_code == 200
        ((span, resource),) = collector.spans()  # not of what never reached the engine
    assert (span.name, span.kind, span.trace_id.hex(), span.parent_span_id.hex()) == ("llm_request", 2, TRACE, PARENT)
    assert attributes(resource)["service.name"] == "nanoserve"
    given = attributes(span)
    latencies = {name: given.pop(name) for name in [*given] if name.startswith("gen_ai.latency.")}
    assert given == {
        "gen_ai.request.id": "it",
        "gen_ai.response.model": "tiny_chat",
        "gen_ai.request.n": 2,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.usage.num_sequences": 2,
        "gen_ai.usage.prompt_tokens": len(FakeEngine().tokenizer.encode("A page")),  # type: ignore[union-attr]
        "gen_ai.usage.completion_tokens": 6,
    }
    names = ("time_in_queue", "time_to_first_token", "e2e", "time_in_model_prefill", "time_in_model_decode")
    queue, first, whole, prefill, decode = (latencies.pop(f"gen_ai.latency.{name}") for name in names)
    assert latencies == {"gen_ai.latency.time_in_model_inference": pytest.approx(prefill + decode)}
    assert 0 <= queue <= first <= whole
    assert first == pytest.approx(queue + prefill)
    assert span.end_time_unix_nano - span.start_time_unix_nano == pytest.approx(1e9 * whole, rel=0.5)


def test_a_request_that_the_engine_fails_is_an_error_and_a_client_that_asks_for_no_trace_gets_none(
    collector: Collector,
) -> None:
    from phase0_request.request import FinishReason

    async def check() -> None:
        engine = FakeEngine(lambda _: [5, FinishReason.ERROR])
        async with client(engine, connect.settings(otlp_traces_endpoint=collector.endpoint)) as http:
            await http.post("/v1/completions", json={"prompt": "A page"})
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
            await http.post("/v1/completions", json={"prompt": "A page"}, headers=headers)

    asyncio.run(check())
    ((span, _),) = collector.spans()
    assert (span.status.code, span.status.message) == (2, "internal_error")
    assert span.parent_span_id == b""


def test_without_the_sdk_the_flag_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phase6_integration.extras.observe.span_settings.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"otlp_traces_endpoint needs .* pip install 'nano-serving\[otel\]'"):
        connect.settings(otlp_traces_endpoint="http://127.0.0.1:4318/v1/traces")
    with pytest.raises(ValueError, match="must be a URL"):
        connect.settings(otlp_traces_endpoint="127.0.0.1:4317")


def test_an_answer_of_the_collector_that_is_long_is_not_read() -> None:
    sent, long = 0, 256 << 20

    class Endless(Receiver):
        def do_POST(self) -> None:
            nonlocal sent
            super().do_POST()
            with contextlib.suppress(OSError):  # the exporter has closed the connection
                while sent < long:
                    sent += self.wfile.write(b"a" * (1 << 20))

    with Collector() as one, ThreadPoolExecutor(1) as pool:
        one.RequestHandlerClass = Endless
        pool.submit(one.serve_forever, 0.01)
        settings = connect.settings(otlp_traces_endpoint=one.endpoint)

        async def check() -> None:
            async with client(FakeEngine(), settings) as http:
                await http.post("/v1/completions", json={"prompt": "A page"})

        asyncio.run(check())
        assert len(one.spans()) == 1
        one.shutdown()
    assert sent < long


def test_a_collector_that_sends_elsewhere_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """The exporter takes any status below 400 for a success."""

    class Elsewhere(Receiver):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(308)
            self.send_header("location", "https://collector/v1/traces")
            self.end_headers()
            asked.set()

    asked = threading.Event()
    with Collector() as one, ThreadPoolExecutor(1) as pool:
        one.RequestHandlerClass = Elsewhere
        pool.submit(one.serve_forever, 0.01)
        (layer,) = spans.layer(connect.settings(otlp_traces_endpoint=one.endpoint))
        layer.kwargs["tracer"].start_span("a request").end()
        spans._providers[-1].force_flush()
        assert asked.is_set()
        one.shutdown()
    assert "https://collector/v1/traces" in caplog.text
