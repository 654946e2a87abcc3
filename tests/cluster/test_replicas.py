"""Two replicas of the bundled model on this machine, by Ray Serve."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
from asking import LONG, ask, stream
from conftest import Deployed, until

from phase0_request.params import SamplingParams
from phase0_request.tokenizer import Tokenizer
from phase6_integration.engine.engine import NanoServingEngine

QUESTIONS = ["What is a KV cache?", "What is paging?", "What does a scheduler do?", "What is a prefix cache?"]


def test_answers_are_those_of_one_engine(two: Deployed) -> None:
    tokenizer = Tokenizer.from_pretrained()
    with NanoServingEngine.from_pretrained(kv_cache_pages=256, threads=1) as engine:
        chats = [tokenizer.chat([{"role": "user", "content": question}]) for question in QUESTIONS]
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
    """The engines are idle again long before a stream could have ended by itself."""
    client, tokens, before = two.client(), 1500, two.stats()["requests"]["finished"]["abort"]
    begin = time.monotonic()
    ask(client, LONG, max_tokens=100, extra_body={"ignore_eos": True})
    seconds = (time.monotonic() - begin) * tokens / 100  # of a stream that runs alone

    def begun(number: int) -> "openai.Stream[Any]":
        events = stream(client, f"{number}: {LONG}", tokens)
        next(events)
        return events

    with ThreadPoolExecutor(8) as pool:
        streams = [*pool.map(begun, range(8))]
    begin = time.monotonic()
    for each in streams:
        each.close()
    until(lambda: two.stats()["requests"]["finished"]["abort"] >= before + 8)
    until(lambda: two.stats()["requests"]["running"] == 0)
    assert time.monotonic() - begin < seconds / 2
    assert two.stats()["pages"]["used"] == 0


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
