"""Class: what an error, a path or another site may learn.

Published cases: the class of addresses and paths in error messages, and of path traversal. The key's own comparison is
in test_middleware: all digests in constant time (CVE-2025-59425, vLLM), on every path that is not in a short list
(CVE-2026-48746, vLLM).
"""

import httpx
import pytest

from phase0_request.request import FinishReason
from phase6_integration.api.settings import ServerSettings
from phase6_integration.process.async_engine import Health
from tests.phase6_integration.adversarial.raw import error_in, heard, line, listening
from tests.phase6_integration.fake_engine import FakeEngine

SECRET = "hunter2-secret"
BAD = [
    ("/v1/completions", b'{"prompt": "hunter2-secret'),
    ("/v1/completions", b'{"prompt": "hunter2-secret", "temperature": "hunter2-secret"}'),
    ("/v1/completions", b'{"prompt": "hunter2-secret", "model": "hunter2-secret"}'),
    ("/v1/completions", b'{"prompt": {"hunter2-secret": 1}}'),
    ("/v1/completions", b'{"prompt": "hunter2-secret", "logit_bias": {"1": "hunter2-secret"}}'),
    ("/v1/completions", b'{"prompt": "a", "stop": ["hunter2-secret", 1]}'),
    ("/v1/completions", b'["hunter2-secret"]'),
    ("/v1/completions", b"\xff\xfehunter2-secret"),
    ("/v1/completions", b'{"prompt": "' + b"hunter2-secret " * 3000 + b'"}'),
    (
        "/v1/chat/completions",
        b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "hunter2-secret"}}]}]}',
    ),
    ("/v1/chat/completions", b'{"messages": [{"role": "assistant", "content": "hunter2-secret", "tool_calls": 7}]}'),
    ("/tokenize", b'{"prompt": 5, "model": "hunter2-secret"}'),
    ("/detokenize", b'{"tokens": ["hunter2-secret"]}'),
    ("/v1/hunter2-secret", b"{}"),
]


@pytest.mark.parametrize(("path", "body"), BAD)
def test_an_error_repeats_nothing_of_what_was_sent(plain: str, path: str, body: bytes) -> None:
    response = httpx.post(plain + path, content=body, headers={"content-type": "application/json"})
    assert 400 <= response.status_code < 500
    assert SECRET not in response.text + str(response.headers)
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/playground.html",
        "//etc/passwd",
        "/v1/models/..%2f..%2fetc%2fpasswd",
    ],
)
def test_no_path_leads_to_a_file(plain: str, path: str) -> None:
    with line(plain) as one:
        one.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        assert error_in(heard(one))[0] == 404


def failing(_: object) -> list[FinishReason]:
    return [FinishReason.ERROR]


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_request_tells_its_id_and_no_reason(stream: bool) -> None:
    with listening(lambda: FakeEngine(failing)) as url:
        body = {"prompt": "a", "stream": stream}
        response = httpx.post(f"{url}/v1/completions", json=body, headers={"x-request-id": "mine"})
    assert "no client may see" not in response.text
    assert "mine" in response.text
    assert response.status_code == 500, (
        "the engine fails before it admits the request, so a stream has not begun either"
    )


@pytest.mark.parametrize("health", [h for h in Health if h is not Health.READY])
def test_health_says_what_is_wrong_and_not_where(health: Health) -> None:
    def make() -> FakeEngine:
        class Broken(FakeEngine):
            async def __aenter__(self) -> "FakeEngine":
                self.health, self.reason = health, "OSError: /secret/place at 0x7f00"
                return self

        return Broken()

    with listening(make, ServerSettings(api_keys=("k",))) as url:
        asked = httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, headers={"authorization": "Bearer k"})
        response = httpx.get(f"{url}/health")
    for one in (asked, response):
        assert one.status_code == 503
        assert int(one.headers["retry-after"]) > 0
        assert one.json()["error"]["code"] == health.value
        assert "secret" not in one.text
        assert "0x" not in one.text
    assert health.value in response.json()["error"]["message"]
