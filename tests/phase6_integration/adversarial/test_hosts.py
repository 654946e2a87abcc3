"""Pages of other sites against a server on this machine: DNS rebinding (CWE-350), cross-origin requests (CWE-942)."""

from typing import Any

import httpx2
import pytest

from phase6_integration import connect
from phase6_integration.serve_flags import settings_from
from tests.phase6_integration.posting import send

PAGE = "https://chat.example.com"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


def ask(method: str, path: str, headers: dict[str, str], **settings: Any) -> httpx2.Response:
    return send(method, path, settings=connect.settings(**settings), headers=headers)


def hosts_of(**flags: Any) -> tuple[str, ...]:
    return settings_from(flags, {}).allowed_hosts


LOOPBACK = hosts_of()
ANSWERED = [
    "localhost",
    "LOCALHOST:8000",
    "localhost.:8000",
    "app.localhost",
    "127.0.0.1:9000",
    "[::1]:8000",
    "192.168.1.7",
]
REFUSED = [
    *("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "evil-localhost"),
    *("", "::1", "127.1.evil", "0x7f.1"),
]


@pytest.mark.parametrize(("host", "status"), [*((host, 200) for host in ANSWERED), *((host, 421) for host in REFUSED)])
def test_a_server_on_a_loopback_address_answers_to_local_names_and_to_addresses(host: str, status: int) -> None:
    """After DNS rebinding a page of evil.example reads this server's answers as its own origin's. Its Host tells."""
    response = ask("GET", "/v1/models", {"host": host}, allowed_hosts=LOOPBACK)
    assert response.status_code == status
    if status != 200:
        assert response.json()["error"]["code"] == "unknown_host"
        assert host not in response.text or not host


def test_which_hosts_are_checked_follows_from_the_address_that_the_server_listens_on() -> None:
    assert {hosts_of(host=host) for host in ("127.0.0.2", "::1", "localhost")} == {LOOPBACK}
    assert {hosts_of(host=host) for host in ("0.0.0.0", "::", "10.0.0.1")} == {()}
    assert hosts_of(host="0.0.0.0", allowed_hosts=["a.example"]) == ("a.example",)
    for host, allowed, status in (
        ("llm.example.com", "*.example.com", 200),
        ("example.org", "*.example.com", 421),
        ("any.thing", "*", 200),
    ):
        assert ask("GET", "/version", {"host": host}, allowed_hosts=(allowed,)).status_code == status


def test_no_other_origin_may_read_answers_or_send_json_by_default() -> None:
    headers = {"origin": PAGE}
    assert not {name for name in ask("GET", "/v1/models", headers).headers if name.startswith("access-control")}
    preflight = ask("OPTIONS", "/v1/completions", headers | PREFLIGHT)
    assert preflight.status_code == 405
    assert "access-control-allow-origin" not in preflight.headers


def test_an_allowed_origin_may_and_another_may_not() -> None:
    given: dict[str, Any] = {"allowed_origins": (PAGE,), "api_keys": ("k",)}
    preflight = ask("OPTIONS", "/v1/completions", {"origin": PAGE, **PREFLIGHT}, **given)
    assert preflight.status_code == 200, "a preflight carries no key"
    assert preflight.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    refused = ask("GET", "/v1/models", {"origin": PAGE}, **given)
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE), "it may read the error"
    for headers in ({"origin": "https://evil.example"}, {"origin": "null"}):
        assert "access-control-allow-origin" not in ask("GET", "/v1/models", headers, **given).headers
        answer = ask("OPTIONS", "/v1/completions", headers | PREFLIGHT, **given)
        assert (answer.status_code, "access-control-allow-origin" in answer.headers) == (400, False)


def test_an_allowed_origin_does_not_lift_the_check_of_the_host() -> None:
    given: dict[str, Any] = {"allowed_origins": (PAGE,), "allowed_hosts": LOOPBACK}
    for host, status in (("evil.example", 421), ("localhost", 200)):
        assert ask("GET", "/v1/models", {"origin": PAGE, "host": host}, **given).status_code == status


@pytest.mark.parametrize("origin", ["chat.example.com", "https://a.example/path", "null", "https://"])
def test_what_is_no_origin_is_refused_at_the_start(origin: str) -> None:
    with pytest.raises(ValueError, match="allowed_origins must be"):
        connect.settings(allowed_origins=(origin,))
