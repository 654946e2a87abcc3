"""KV events as a router receives them, against vLLM's layout and the content of the cache."""

import asyncio
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from phase0_request import SamplingParams
from phase0_request.support.checks import ConfigError
from phase4_radix.extras.block_hashes import block_hashes
from phase4_radix.prefix_cache import PrefixCache
from phase6_integration.engine.connect_engine import engine_options
from phase6_integration.engine.engine import NanoServingEngine
from phase6_integration.extras.kv_events.kv_events import KVEventPublisher
from phase6_integration.extras.kv_events.kv_events_options import KVEventsConfig, KVEventsOptions
from phase6_integration.process.health import Health
from tests.phase4_radix.steps import SIZE, admit, compute, finish, named
from tests.phase6_integration.real_engine import GREEDY, answer, engine, process
from tests.phase6_integration.subscriber import Subscriber, cached, config

PROMPT = list(range(10, 10 + 3 * SIZE))


def publisher(directory: Path, pages: int = 8, **more: Any) -> tuple[PrefixCache, KVEventPublisher]:
    cache = PrefixCache(pages, SIZE)
    return cache, KVEventPublisher(cache, KVEventsConfig.of(config(directory, **more)))


def one_step(cache: PrefixCache, events: KVEventPublisher, prompt: list[int], salt: str = "") -> None:
    request = admit(cache, "one", prompt, salt)
    compute(cache, request)
    finish(cache, request)
    events.flush()


def test_events_are_in_vllms_format(tmp_path: Path) -> None:
    """Named fields of a tagged map, in a batch that is an array."""
    cache, events = publisher(tmp_path, pages=4)
    before = time.time()
    first = admit(cache, "first", PROMPT)
    compute(cache, first, SIZE)
    events.flush()
    compute(cache, first)
    events.flush()
    finish(cache, first)
    events.flush()  # nothing has changed
    one_step(cache, events, PROMPT[: 2 * SIZE], salt="a")
    with Subscriber(tmp_path) as subscriber:
        messages = subscriber.replay(0)
    events.close()
    plain, secret = [named("", PROMPT[: n * SIZE], SIZE) for n in (1, 2, 3)], [named("a", PROMPT[:SIZE], SIZE)]
    secret.append(named("a", PROMPT[: 2 * SIZE], SIZE))
    stored = {"type": "BlockStored", "block_size": SIZE, "lora_id": None, "medium": "GPU", "lora_name": None}
    assert [message[2] for message in messages] == [
        [{"type": "AllBlocksCleared"}],
        [stored | {"block_hashes": plain[:1], "parent_block_hash": None, "token_ids": PROMPT[:SIZE]}],
        [stored | {"block_hashes": plain[1:], "parent_block_hash": plain[0], "token_ids": PROMPT[SIZE:]}],
        [
            {"type": "BlockRemoved", "block_hashes": plain[2:], "medium": "GPU"},
            stored
            | {"block_hashes": secret, "parent_block_hash": None, "token_ids": PROMPT[: 2 * SIZE]}
            | {"extra_keys": [["a"], None], "cache_salt": "a"},
        ],
    ]
    first = messages[0][0]
    assert [message[0] for message in messages] == [*range(first, first + 4)]
    assert [message[3] for message in messages] == [0] * 4
    assert before <= messages[1][1] <= messages[3][1] <= time.time()


def test_a_subscriber_that_comes_late_asks_for_what_it_missed(tmp_path: Path) -> None:
    """Numbers have no holes. A request that is none gets no answer, and does not end the service."""
    cache, events = publisher(tmp_path, topic="kv@pod@model", pages=4096)
    events.flush()  # nothing has happened
    with Subscriber(tmp_path, "kv@") as subscriber:
        subscriber.missed.send_multipart((b"", b"what?"))
        subscriber.missed.send(b"")
        produced = 0
        while not subscriber.live.poll(10):  # its subscription takes a moment
            one_step(cache, events, [produced] * SIZE)
            produced += 1
        topic, (number, *_) = subscriber.receive()
        assert topic == b"kv@pod@model"
        everything = subscriber.replay(0)
        first = everything[0][0]
        assert [message[0] for message in everything] == [*range(first, first + produced + 1)]
        assert subscriber.replay(number) == everything[number - first :]
        assert subscriber.replay(first + produced + 1) == []
        assert cached(everything) == {node for page in range(produced) for node in block_hashes([page] * SIZE, SIZE)}
    events.close()


def test_the_newest_messages_can_be_asked_for(tmp_path: Path) -> None:
    cache, events = publisher(tmp_path, pages=64, buffer_steps=3)
    for token in range(5):
        one_step(cache, events, [token] * SIZE)
    with Subscriber(tmp_path) as subscriber:
        assert [message[2][0]["token_ids"][0] for message in subscriber.replay(0)] == [2, 3, 4]
    events.close()


def test_an_engine_publishes_what_it_caches_and_closes_its_sockets(tmp_path: Path) -> None:
    """At most one message for each step."""
    options = {"kv_cache_pages": 64, "threads": 1, "kv_events_config": config(tmp_path)}
    for _ in range(2):  # the second takes the same files
        with NanoServingEngine.from_pretrained(**options) as served, Subscriber(tmp_path) as subscriber:
            (completion,) = served.generate([PROMPT * 8], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
            messages, steps = subscriber.replay(0), served.get_stats()["steps"]
        tokens = PROMPT * 8 + completion.output_tokens
        assert cached(messages) == {*block_hashes(tokens[:-1], 16)}  # the last token is not computed
        assert len(messages) <= 1 + steps


def test_a_restarted_engine_begins_again_with_an_empty_cache(tmp_path: Path) -> None:
    async def check() -> None:
        options = {"kv_events_config": config(tmp_path), "max_engine_restarts": 1}
        async with engine(**options) as served:
            reply = await answer(served, PROMPT * 8)
            assert reply.finish_reason is not None
            with Subscriber(tmp_path) as subscriber:
                before = await asyncio.to_thread(subscriber.replay, 0)
                assert cached(before) >= {*block_hashes(PROMPT * 8, 16)}
            process(served).kill()
            while served.restarts == 0 or served.health is not Health.READY:
                await asyncio.sleep(0.001)
            with Subscriber(tmp_path) as subscriber:
                ((number, _, events, _),) = await asyncio.to_thread(subscriber.replay, 0)
            assert events == [{"type": "AllBlocksCleared"}]
            assert number > before[-1][0]  # else it would look like an old message
            again = await answer(served, PROMPT * 8, GREEDY, "again")
            assert again.text == reply.text

    asyncio.run(check())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"max_queue_size": 5}, "of the keys enable_kv_cache_events, publisher, .*, got 'max_queue_size'"),
        ({"endpoint": "5557"}, "endpoint"),
        ({"publisher": "null"}, "publisher must be one of zmq"),
        ({"buffer_steps": 0}, "kv_events_config: buffer_steps must be an integer from 1"),
        ({"endpoint": "ipc:///no/such/directory/events"}, "ipc:///no/such/directory/events cannot be opened"),
    ],
)
def test_a_wrong_configuration_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        KVEventPublisher(PrefixCache(4, SIZE), KVEventsConfig.of(given))


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "127.0.0.1"])
def test_an_address_of_this_machine_is_bound_so_it_must_be_free(host: str) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        config = KVEventsConfig(endpoint=f"tcp://{host}:{taken.getsockname()[1]}")
        with pytest.raises(ConfigError, match="cannot be opened"):
            KVEventPublisher(PrefixCache(4, SIZE), config)


def test_events_need_a_prefix_cache_and_pyzmq(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="prefix caching"):
        engine_options(kv_events_config={}, enable_prefix_caching=False)
    assert KVEventsOptions(kv_events_config={"enable_kv_cache_events": False}).kv_events is None
    of_vllm = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv@pod@model"}
    assert KVEventsOptions(kv_events_config=of_vllm).kv_events == KVEventsConfig(
        endpoint="tcp://*:5557", topic="kv@pod@model"
    )
    monkeypatch.setattr("phase6_integration.extras.kv_events.kv_events_options.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'nano-serving\[cluster\]'"):
        KVEventsOptions(kv_events_config={})
