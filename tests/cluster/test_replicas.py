"""Two and four replicas of the bundled model on this machine, by Ray Serve."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from conftest import Deployed, until

QUESTIONS = ["What is a KV cache?", "What is paging?", "What does a scheduler do?", "What is a prefix cache?"]
LONG = "Explain, with all details, how a serving engine keeps many requests going. " * 6


def ask(client: openai.OpenAI, question: str, **options: Any) -> str:
    options = {"temperature": 0, "max_tokens": 24} | options
    message = {"role": "user", "content": question}
    answer = client.chat.completions.create(model="tiny_chat", messages=[message], **options)
    return str(answer.choices[0].message.content)


def stream(client: openai.OpenAI, question: str, tokens: int) -> "openai.Stream[Any]":
    """It never ends by itself."""
    return client.completions.create(
        model="tiny_chat",
        prompt=question,
        max_tokens=tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )


def test_answers_are_those_of_one_engine(two: Deployed) -> None:
    from phase0_request.params import SamplingParams
    from phase6_integration.engine.engine import NanoServingEngine

    with NanoServingEngine.from_pretrained(kv_cache_pages=256, threads=1) as engine:
        chats = [engine.tokenizer.chat([{"role": "user", "content": question}]) for question in QUESTIONS]
        wanted = [each.text for each in engine.generate(chats, SamplingParams(temperature=0, max_tokens=24))]
    client = two.client()
    with ThreadPoolExecutor(8) as pool:
        given = [*pool.map(lambda question: ask(client, question), QUESTIONS * 4)]
    assert given == wanted * 4


def test_a_stream_of_several_answers_ends_each_at_its_stop_string(two: Deployed) -> None:
    client = two.client()
    whole = ask(client, QUESTIONS[0])
    word = whole.split()[3]
    events = client.chat.completions.create(
        model="tiny_chat",
        messages=[{"role": "user", "content": QUESTIONS[0]}],
        n=3,
        stop=word,
        temperature=0,
        max_tokens=24,
        stream=True,
    )
    texts, reasons = dict.fromkeys(range(3), ""), {}
    for event in events:
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    assert texts == dict.fromkeys(range(3), whole.partition(word)[0])
    assert reasons == dict.fromkeys(range(3), "stop")
    until(lambda: ask(client, QUESTIONS[1]) and two.stats()["requests"]["running"] == 0)


def test_a_client_that_hangs_up_ends_its_request_in_the_engine(two: Deployed) -> None:
    """The engines have room for few: a new request runs long before the others would have ended."""
    client, tokens = two.client(), 1500
    streams = [stream(client, f"{number}: {LONG}", tokens) for number in range(8)]
    begin, read = time.monotonic(), 0
    for _ in zip(range(40), streams[0], strict=False):
        read += 1
    rate = read / (time.monotonic() - begin)
    for each in streams:
        each.close()
    closed = time.monotonic()
    until(lambda: ask(client, QUESTIONS[0], max_tokens=1) and two.stats()["requests"]["running"] <= 1)
    until(lambda: ask(client, QUESTIONS[1], max_tokens=1) and two.stats()["pages"]["used"] <= 4)
    assert time.monotonic() - closed < (tokens - read) / rate / 2
    assert two.stats()["requests"]["finished"]["abort"] >= 8


def test_a_replica_that_is_killed_loses_no_request_that_had_not_begun(two: Deployed) -> None:
    client, before = two.client(), two.replicas()
    outcomes: list[tuple[int, str | None]] = []

    def read(number: int) -> None:
        pieces, code = 0, None
        try:
            for event in stream(client, f"{number}: {LONG}", 150):
                pieces += any(choice.text for choice in event.choices)
        except openai.APIError as error:
            code = str(error.code)
        outcomes.append((pieces, code))

    with ThreadPoolExecutor(24) as pool:
        for number in range(24):
            pool.submit(read, number)
        time.sleep(1)
        os.kill(min(before), signal.SIGKILL)
    assert len(outcomes) == 24
    assert {code for _, code in outcomes} <= {None, "lost"}, outcomes
    assert all(pieces for pieces, _ in outcomes), "those that had not begun were begun again elsewhere"
    assert all(pieces < 150 for pieces, code in outcomes if code), "and those that had say that they are not whole"
    until(lambda: len(two.replicas() - {min(before)}) == 2)
    assert ask(client, QUESTIONS[0])


def test_an_update_replaces_the_replicas_without_a_failed_request(two: Deployed) -> None:
    client, before = two.client(), two.replicas()
    answers: list[str] = []
    ended, failures = threading.Event(), list[Exception]()

    def keep_asking(question: str) -> None:
        while not ended.is_set():
            try:
                answers.append(ask(client, question))
            except Exception as error:
                failures.append(error)

    with ThreadPoolExecutor(4) as pool:
        for question in QUESTIONS:
            pool.submit(keep_asking, question)
        try:
            two.change(max_num_seqs=7)
            until(lambda: len(two.replicas()) == 2 and not two.replicas() & before)
            count = len(answers)
            until(lambda: failures or len(answers) > count + 20)
        finally:
            ended.set()
    assert failures == []
    assert len({*answers}) == len(QUESTIONS)


def test_a_wrong_file_changes_nothing(two: Deployed) -> None:
    before = two.replicas()
    two.change(max_num_seqs=0)
    until(lambda: any("nothing is changed" in line and "max_num_seqs" in line for line in two.log))
    assert two.replicas() == before
    assert ask(two.client(), QUESTIONS[0])


def test_a_prefix_that_all_share_is_served_by_all_replicas(four: Deployed) -> None:
    client = four.client()
    ask(client, LONG)
    before = four.engine_seconds()
    with ThreadPoolExecutor(32) as pool:
        assert all(pool.map(lambda number: ask(client, f"{LONG} {number}", max_tokens=48), range(160)))
    used = [now - then for now, then in zip(four.engine_seconds(), before, strict=True)]
    assert len(used) == 4
    assert max(used) < 3 * min(used), used
    stats = four.stats()["prefix_cache"]
    assert stats["hit_rate"] > 0.5, stats


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"http_options": {"prt": 1}}, "http_options.prt: Extra inputs are not permitted"),
        ({"applications": []}, "one must have import_path"),
    ],
)
def test_a_wrong_file_is_refused_before_anything_starts(change: dict[str, Any], message: str, tmp_path: Any) -> None:
    import subprocess
    import sys

    import yaml
    from conftest import configuration

    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(configuration(2, 8000) | change))
    command = [sys.executable, "-m", "phase6_integration.cli", "deploy", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr
