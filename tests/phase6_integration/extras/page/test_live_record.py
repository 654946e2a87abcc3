"""GET /record: who may watch, how many, and whether the text of requests is part of it."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from fastapi import FastAPI

from phase6_integration import connect
from phase6_integration.api.settings import ServerSettings
from phase6_integration.connect import create_app
from phase6_integration.extras.page.live_record import MOST_OF_A_CLIENT, MOST_WATCHERS
from phase6_integration.extras.page.record_messages import NAME, Watch, decode_watch, encode
from phase6_integration.process.health import Health
from phase6_integration.process.messages import SideMessage
from tests.phase6_integration.asgi import Call, awaited
from tests.phase6_integration.fake_engine import FakeEngine, client


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({}, True),
        ({"host": "localhost"}, True),
        ({"host": "::1"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "192.168.1.2"}, False),
        ({"api_keys": ("sk-1",)}, False),
        ({"root_path": "/llm"}, False),
        ({"uds": "/tmp/socket"}, False),
        ({"allowed_hosts": ("localhost",)}, True),
        ({"allowed_hosts": ("localhost", "llm.example.com")}, False),  # a proxy's
        ({"allowed_origins": ("*",)}, False),  # any page in the browser could read along
        ({"host": "0.0.0.0", "api_keys": ("sk-1",), "playground_text": True}, True),
        ({"playground_text": False}, False),
    ],
)
def test_the_text_is_shown_by_itself_only_where_nobody_else_can_watch(settings: dict[str, object], shown: bool) -> None:
    assert create_app(FakeEngine(), connect.settings(**settings)).state.live_record.text is shown


def call_of(app: FastAPI, method: str = "GET", client: int = 1, headers: dict[str, str] | None = None) -> Call:
    call = Call(app, "/record", None, headers)
    call.scope |= {"method": method, "client": (f"127.0.0.{client}", 1)}
    return call


def asked(watch: Watch) -> SideMessage:
    return SideMessage(NAME, encode(watch))


class WritingEngine(FakeEngine):
    """It begins a record whenever it is asked for one."""

    def send(self, message: SideMessage) -> None:
        super().send(message)
        if decode_watch(message.body).on:
            self.handle(SideMessage(NAME, encode({"record": 1, "model": ""})))


@awaited
async def test_watchers_are_few_and_one_that_leaves_makes_room() -> None:
    engine = WritingEngine()
    app = create_app(engine, ServerSettings())
    for _ in range(2):
        async with AsyncExitStack() as stack:
            clients = [number // MOST_OF_A_CLIENT for number in range(MOST_WATCHERS + 9)]  # at once
            calls = [await stack.enter_async_context(call_of(app, client=client)) for client in clients]
            for call in calls:
                await call.until(lambda call: call.status is not None)
            refused = [call for call in calls if call.status != 200]
            assert len(refused) == 9
            for call in refused:
                await call.until(lambda call: call.complete)
                assert (call.status, call.json["error"]["code"]) == (429, "too_many_watchers")
            for call in calls:
                call.leave()
        assert not app.state.live_record.watchers.by_client
        assert engine.sent[-1] == asked(Watch(False)), "nobody reads any more"


@awaited
async def test_a_client_that_watches_many_times_keeps_no_other_from_watching() -> None:
    app = create_app(WritingEngine(), ServerSettings())
    async with AsyncExitStack() as stack:
        clients = [1] * MOST_WATCHERS + [2]
        calls = [await stack.enter_async_context(call_of(app, client=client)) for client in clients]
        for call in calls:
            await call.until(lambda call: call.status is not None)
        for call in calls:
            call.leave()
    *of_one, other = [call.status for call in calls]
    assert (of_one.count(200), of_one.count(429), other) == (MOST_OF_A_CLIENT, MOST_WATCHERS - MOST_OF_A_CLIENT, 200)


@pytest.mark.parametrize(
    ("headers", "allowed", "status"),
    [
        ({}, (), 200),  # of a program
        ({"sec-fetch-site": "none"}, (), 200),  # typed by a person
        ({"sec-fetch-site": "same-origin"}, (), 200),
        ({"sec-fetch-site": "cross-site"}, (), 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, (), 403),
        ({"sec-fetch-site": "same-site"}, (), 403),  # another port of this machine
        ({"sec-fetch-site": "cross-site", "origin": "https://a.example"}, ("https://b.example",), 403),
        ({"sec-fetch-site": "cross-site", "origin": "https://a.example"}, ("https://a.example",), 200),
        ({"sec-fetch-site": "cross-site", "origin": "https://a.example"}, ("*",), 200),
    ],
)
@awaited
async def test_a_page_of_another_site_does_not_make_the_engine_write(
    headers: dict[str, str], allowed: tuple[str, ...], status: int
) -> None:
    engine = WritingEngine()
    async with call_of(create_app(engine, connect.settings(allowed_origins=allowed)), headers=headers) as call:
        await call.until(lambda call: call.status is not None)
        call.leave()
    assert call.status == status
    assert bool(engine.sent) is (status == 200)


@awaited
async def test_lines_are_events_in_order_until_the_engine_is_drained() -> None:
    engine = WritingEngine()
    async with call_of(create_app(engine, ServerSettings())) as call:
        await call.until(lambda call: call.status == 200)
        engine.handle(SideMessage(NAME, encode({"step": 1, "out": [0]})))
        await call.until(lambda call: len(call.events) == 2)
        await engine.drain(1)
        await call.until(lambda call: call.complete)
    assert call.events == [{"record": 1, "model": "tiny_chat"}, {"step": 1, "out": [0]}]


async def is_watched(engine: FakeEngine) -> None:
    async with asyncio.timeout(10):
        while not engine.sent:
            await asyncio.sleep(0)


@awaited
async def test_the_answer_begins_when_the_engine_writes_so_that_what_is_asked_for_next_is_in_the_record() -> None:
    engine = FakeEngine()
    async with call_of(create_app(engine, ServerSettings())) as call:
        await is_watched(engine)
        for _ in range(20):
            await asyncio.sleep(0)
        assert call.status is None
        engine.handle(SideMessage(NAME, encode({"record": 1, "model": ""})))
        await call.until(lambda call: call.status == 200)
        call.leave()


@awaited
async def test_an_engine_that_ends_before_it_writes_ends_the_answer() -> None:
    engine = FakeEngine()
    async with call_of(create_app(engine, ServerSettings())) as call:
        await is_watched(engine)
        await engine.drain(1)
        await call.until(lambda call: call.complete)
    assert (call.status, call.events) == (200, [])


@awaited
async def test_the_head_alone_ends_at_once() -> None:
    async with call_of(create_app(FakeEngine(), ServerSettings()), "HEAD") as call:
        await call.until(lambda call: call.complete)
    assert (call.status, call.events) == (200, [])


def test_an_engine_that_is_not_ready_cannot_be_watched() -> None:
    async def ask() -> None:
        engine = FakeEngine()
        engine.health = Health.LOADING
        async with client(engine) as http:
            assert (await http.get("/record")).status_code == 503

    asyncio.run(ask())
