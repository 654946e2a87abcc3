"""Clients of one server against each other: what one learns of another's prompts, and what one leaves for the others.

The classes of published attacks: guessing prompts of other users by what a shared prefix cache reveals (vLLM's
CVE-2025-46570), and uncontrolled consumption of a shared resource (CWE-400, CWE-770).
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx2
import pytest

from phase0_request.request import FinishReason
from phase0_request.tokenizer import Tokenizer
from phase6_integration import connect
from phase6_integration.api.errors import RequestError
from phase6_integration.api.formatter import KEEP_ALIVE
from phase6_integration.api.settings import ServerSettings
from phase6_integration.api.tokenization import PLACES, SHORT, TokenizerPool
from phase6_integration.app import create_app
from phase6_integration.process.async_engine import AsyncEngine, Observer
from phase6_integration.process.messages import EngineRequest, Update
from phase6_integration.process.outputs import OutputStream
from tests.phase6_integration.asgi import Call, awaited
from tests.phase6_integration.fake_engine import FakeEngine
from tests.phase6_integration.real_engine import OnTheEngine, shared
from tests.phase6_integration.running import COMPLETIONS, run

SECRET = "The password of the vault is seven times forty-two, and nothing else opens it. " * 3
KEYS = connect.settings(api_keys=("sk-alice", "sk-bob"))


@pytest.fixture(scope="module")
def on_an_engine() -> Iterator[OnTheEngine]:
    """The bundled model with eight places."""
    with shared(max_num_seqs=8, check_invariants=False) as run_on:
        yield run_on


def client(made: AsyncEngine, key: str, settings: ServerSettings = KEYS, **more: Any) -> httpx2.AsyncClient:
    transport = httpx2.ASGITransport(create_app(made, settings), **more)
    return httpx2.AsyncClient(
        transport=transport, base_url="http://front", headers={"authorization": f"Bearer {key}"}, timeout=None
    )


async def ask(http: httpx2.AsyncClient, **body: Any) -> httpx2.Response:
    return await http.post(COMPLETIONS, json={"prompt": "Hello", "max_tokens": 1, "ignore_eos": True, **body})


# What one learns of another.


async def cached(http: httpx2.AsyncClient, **body: Any) -> int:
    response = await ask(http, prompt=SECRET, **body)
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_key_sees_no_cached_tokens_of_the_prompts_of_another_key(on_an_engine: OnTheEngine) -> None:
    """B sent A's prompt, and `cached_tokens` (and the time to the first token) said that it was known."""

    async def test(made: AsyncEngine) -> None:
        async with client(made, "sk-alice") as alice, client(made, "sk-bob") as bob:
            for salt in ({}, {"cache_salt": "mine"}):
                assert await cached(alice, **salt) == 0
                assert await cached(bob, **salt) == 0
                assert await cached(alice, **salt) > 32  # its own, as ever

    on_an_engine(test)


def test_a_tenant_is_an_opaque_id_that_no_header_changes(caplog: pytest.LogCaptureFixture) -> None:
    """One client is one tenant: by its key, or by its address, or by its /64 of IPv6 addresses."""

    async def tenant(settings: ServerSettings, key: str = "", address: str = "10.0.0.1", **headers: str) -> str:
        made = FakeEngine()
        async with client(made, key, settings, client=(address, 5)) as http:
            http.headers.update(headers)
            assert (await ask(http)).status_code == 200
        return made.submitted[0].tenant

    async def test() -> None:
        alice, bob = await tenant(KEYS, "sk-alice"), await tenant(KEYS, "sk-bob")
        assert alice != bob
        assert alice == await tenant(KEYS, "sk-alice", "10.0.0.2")
        open_ = ServerSettings()
        home = await tenant(open_)
        assert home not in (alice, await tenant(open_, address="10.0.0.2"))
        assert home == await tenant(open_, "sk-made-up") == await tenant(open_, **{"x-forwarded-for": "1.2.3.4"})
        assert home == await tenant(open_, address="::ffff:10.0.0.1")
        assert await tenant(open_, address="2001:db8::1") == await tenant(open_, address="2001:db8::ffff:2")
        assert await tenant(open_, address="2001:db8::1") != await tenant(open_, address="2001:db8:0:1::1")
        assert (alice[:4], home[:8], len(alice), len(home)) == ("key-", "address-", 4 + 16, 8 + 16)

    caplog.set_level(logging.DEBUG)
    run(test())
    assert "sk-alice" not in caplog.text


# What one leaves for the others.


class Steps(Observer):
    """Counts steps, notes when so many requests wait, and at which step each tenant last submitted."""

    def __init__(self, made: AsyncEngine, waiting: int) -> None:
        self.count = 0
        self.last: dict[str, int] = {}
        self.crowded = asyncio.Event()
        self._waiting = waiting
        made.observers.append(self)
        self._submit = made.submit
        made.submit = self.submit  # type: ignore[method-assign]

    def submit(self, request: EngineRequest) -> OutputStream:
        self.last[request.client] = self.count
        return self._submit(request)

    def stepped(self, update: Update, prompt_tokens: int, cached_tokens: int) -> None:
        self.count += 1
        if update.gauges.waiting >= self._waiting:
            self.crowded.set()


def test_a_one_token_request_does_not_wait_for_a_greedy_client(on_an_engine: OnTheEngine) -> None:
    """Sixteen requests with n=128 held all places for 45 seconds, while another's one-token request got not a byte.
    Steps are counted from the submission to the engine: one makes the place, one computes the prompt, the others are in
    the sockets already. They were 5,103."""

    async def test(made: AsyncEngine) -> None:
        steps = Steps(made, waiting=900)
        async with client(made, "sk-greedy", both) as greedy, client(made, "sk-modest", both) as modest:
            flood = [asyncio.create_task(ask(greedy, n=128, max_tokens=200)) for _ in range(16)]
            await steps.crowded.wait()
            assert (await ask(modest)).status_code == 200
            *_, submitted = steps.last.values()
            assert steps.count - submitted <= 12
            ends = asyncio.as_completed(flood)
            refused = [(await next(ends)).json()["error"]["code"] for _ in range(8)]
            assert refused == ["queue_full"] * 8  # the others hold half of the queue
            for task in flood:
                task.cancel()
            await asyncio.gather(*flood, return_exceptions=True)

    both = connect.settings(api_keys=("sk-greedy", "sk-modest"))
    on_an_engine(test)


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0)


# While it waits.


@pytest.mark.parametrize(
    ("reason", "code"),
    [(None, None), (FinishReason.TIMEOUT, "deadline_passed"), (FinishReason.ERROR, "internal_error")],
)
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
@awaited
async def test_a_stream_that_is_queued_gets_its_status_and_comments(
    path: str, reason: FinishReason | None, code: str | None
) -> None:
    """It got no byte for as long as it waited, and proxies and clients gave up. An error after that is an event."""
    made = FakeEngine(lambda request: request.prompt_tokens if reason is None else [reason])
    made.room.clear()
    app = create_app(made, ServerSettings(keepalive=0.01))
    prompt = {"prompt": "a"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
    async with Call(app, path, {"stream": True, "max_tokens": 2, **prompt}) as call:
        await call.until(lambda call: call.content.count(KEEP_ALIVE) >= 2)
        assert (call.status, call.content) == (200, KEEP_ALIVE * call.content.count(KEEP_ALIVE))
        made.room.set()
    *others, last, done = call.events
    assert done == "[DONE]"
    if code is None:
        assert last["choices"][0]["finish_reason"] in ("length", "stop")
    else:
        assert (others, last["error"]["code"]) == ([], code)


@awaited
async def test_requests_have_a_deadline_unless_it_is_turned_off() -> None:
    for settings, timeout in ((ServerSettings(), 1800), (ServerSettings(request_timeout=0), None)):
        made = FakeEngine()
        async with client(made, "", settings) as http:
            await ask(http)
        assert made.asked[0].timeout == timeout


@awaited
async def test_clients_take_turns_at_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a client that sends ten texts at once waits no longer than two of those of another. Fault: the texts of
    all clients waited in one line, before any limit of a client counted."""
    encoded, encode = list[str](), Tokenizer.encode_batch

    def noted(tokenizer: Tokenizer, texts: Sequence[str], *rest: Any) -> Any:
        encoded.extend(texts)
        return encode(tokenizer, texts, *rest)

    monkeypatch.setattr(Tokenizer, "encode_batch", noted)
    pool = TokenizerPool(FakeEngine(), ServerSettings())
    texts = [("many", f"many {number}") for number in range(10)] + [("one", "one")]
    await asyncio.gather(*(pool.encode([text], tenant) for tenant, text in texts))
    assert len(encoded) == 11
    assert encoded.index("one") <= PLACES


HELLO = {"role": "user", "content": "Hello"}
LONG_TEXT = "a page of the cache " * (SHORT // 20 + 1)
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": LONG_TEXT}}}
LONG: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": LONG_TEXT}]},
    {"messages": [HELLO, {"role": "assistant", "content": "", "tool_calls": [CALL]}]},
    {"messages": [HELLO], "variables": {"tools": [{"type": "function", "function": {"description": LONG_TEXT}}]}},
    {"messages": [HELLO], "variables": {"tools": [{LONG_TEXT: 1}]}},
    {"messages": [{"role": "user", "content": "a page of the cache"}] * (SHORT // 20)},
    {"messages": [HELLO], "variables": {"tools": [{"x": [1] * SHORT}]}},
    {"messages": [HELLO], "variables": {"tools": [{"x": [10**4000] * 10}]}},
    {"messages": [{"role": "user", "content": "abc " * (SHORT // 5)}]},  # the template writes it four times
]
REPEATING = "{% for m in messages %}{{ m.content * 3 }}{{ m | tojson }}{% endfor %}{{ tools | tojson }}"


@pytest.mark.parametrize("long", [LONG_TEXT, *LONG])
@awaited
async def test_long_texts_do_not_delay_short_ones_of_the_same_client(
    long: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: two texts of 4 MB held both threads, and the chats of all others waited for 16 seconds."""
    found = list[str]()
    answered = hold_long_texts(monkeypatch, lambda: found.append("long"))

    async def send(pool: TokenizerPool, given: Any) -> None:
        await (pool.encode([given], "one") if isinstance(given, str) else pool.chat(given, "one"))

    async def send_short(pool: TokenizerPool) -> None:
        await asyncio.gather(send(pool, "Hello"), send(pool, {"messages": [HELLO]}))
        found.append("short")
        answered.set()

    pool = TokenizerPool(FakeEngine(), ServerSettings(chat_template=REPEATING))
    await asyncio.gather(*(send(pool, long) for _ in range(PLACES + 1)), send_short(pool))
    assert found[0] == "short"
    assert "long" in found


@awaited
async def test_a_short_conversation_that_cannot_fit_is_refused_while_long_texts_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fault: it went to the end of the line for long texts, to be refused there."""
    refused = hold_long_texts(monkeypatch)

    async def send(pool: TokenizerPool) -> None:
        with pytest.raises(RequestError, match=f"at most {pool.most_chars} fit"):
            await pool.chat({"messages": [{"role": "user", "content": "word " * 1000}]}, "one", fits=True)
        refused.set()

    pool = TokenizerPool(FakeEngine(max_model_len=64), ServerSettings())
    await asyncio.gather(*(pool.encode([LONG_TEXT], "one") for _ in range(PLACES + 1)), send(pool))


def hold_long_texts(monkeypatch: pytest.MonkeyPatch, then: Callable[[], object] = lambda: None) -> threading.Event:
    """The event that long texts wait for before they are encoded."""
    event, encode = threading.Event(), Tokenizer.encode_batch

    def held(tokenizer: Tokenizer, texts: Sequence[str], *rest: Any) -> Any:
        if len(texts[0]) > SHORT:
            assert event.wait(10.0)
            then()
        return encode(tokenizer, texts, *rest)

    monkeypatch.setattr(Tokenizer, "encode_batch", held)
    return event
