"""The load generator's measurements, against given arrival times and against numpy."""

import asyncio
import random
import re
from itertools import pairwise

import numpy as np
import pytest

from phase6_integration.load.connection import Connection
from phase6_integration.load.page import page
from phase6_integration.load.report import LATENCIES, SLO, STATISTICS, report
from phase6_integration.load.response import Outcome, Response
from phase6_integration.load.workload import Workload
from tests.phase6_integration.load.load_parts import END, HEAD, USAGE, VLLM_NAMES, Clock, chunk, word


class NullTransport(asyncio.Transport):
    """Discards what is written."""

    def write(self, data: bytes | bytearray | memoryview) -> None: ...

    def abort(self) -> None: ...


def received(script: list[tuple[float, bytes]], stream: bool = True) -> Outcome:
    """The outcome of bytes that arrive at these seconds after the request."""

    async def play() -> Outcome:
        clock = Clock()
        connection = Connection(clock)
        connection.connection_made(NullTransport())
        answer = Response(clock(), stream)
        exchange = asyncio.ensure_future(connection.exchange(b"ask", answer))
        await asyncio.sleep(0)
        for moment, data in script:
            clock.now = 100 + moment
            connection.data_received(data)
        await exchange
        return answer.outcome(clock())

    return asyncio.run(play())


def test_latencies_count_from_the_arrival_of_text() -> None:
    whole = chunk(word("three tokens"))
    outcome = received(
        [
            (0.2, HEAD + chunk(word(""))),  # the head, and a piece without text, are not the first token
            (0.5, chunk(word("one"))),
            (0.6, chunk(": keep-alive\n\n")),
            (0.8, whole[:20]),
            (1.0, whole[20:]),  # an event is there when the last of it is
            (1.5, chunk(word("last", "length")) + chunk(USAGE)),
            (2.5, END),
        ]
    )
    assert outcome.error is None
    assert outcome.ttft == pytest.approx(0.5)
    assert outcome.itl == pytest.approx([0.5, 0.5])
    assert outcome.e2el == pytest.approx(1.5)  # the usage and the end of the stream are no tokens
    assert outcome.tpot == pytest.approx(1.0 / 4)  # by the server's count of tokens, not by pieces
    assert (outcome.input_tokens, outcome.output_tokens) == (9, 5)


def test_the_outcome_does_not_depend_on_how_bytes_are_split() -> None:
    whole = HEAD + b"".join(map(chunk, (word("a"), word("\u00e9 \u4e16"), word("", "length"), USAGE))) + END
    reference = received([(1.0, whole)])
    rng = random.Random(0)
    for _ in range(50):
        cuts = sorted({0, *(rng.randrange(1, len(whole)) for _ in range(rng.randint(1, 12))), len(whole)})
        pieces = [(1.0, whole[start:stop]) for start, stop in pairwise(cuts)]
        assert received(pieces) == reference
    assert reference.error is None
    assert len(reference.deliveries) == 2


def test_without_text_the_first_token_is_at_the_end() -> None:
    outcome = received([(0.7, HEAD + chunk(word("", "length")) + chunk(USAGE) + END)])
    assert outcome.error is None
    assert outcome.ttft == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([word("a"), {"error": {"message": "the engine died"}}], "the engine died"),
        ([word("a", "length")], "the server sent no usage"),
        ([word("a"), USAGE], "the answer has no finish_reason"),
        (["data: {broken\n\n"], "an event of the stream is not what it should be"),
    ],
)
def test_an_incomplete_stream_is_an_error(events: list[object], why: str) -> None:
    outcome = received([(1.0, HEAD + b"".join(map(chunk, events)) + END)])
    assert outcome.error is not None
    assert why in outcome.error


def test_a_stream_without_done_is_an_error() -> None:
    outcome = received([(1.0, HEAD + chunk(word("a", "length")) + chunk(USAGE) + b"0\r\n\r\n")])
    assert outcome.error == "the stream ended without [DONE]"


def test_the_figures_equal_numpy() -> None:
    rng = random.Random(5)
    outcomes = []
    for _ in range(137):
        times = (10 + np.cumsum([rng.expovariate(3) for _ in range(rng.randint(1, 30))])).tolist()
        outcomes.append(
            Outcome(10.0, 30.0, times, rng.randint(1, 50), len(times) * 2, 3, lateness=rng.expovariate(100))
        )
    outcomes.append(Outcome(10.0, 20.0, error="lost"))
    got = report(outcomes, 10.0, SLO(), "m", Workload(num_prompts=138), 8).as_json()
    whole = outcomes[:-1]
    oracle = {
        "ttft": [o.deliveries[0] - 10 for o in whole],
        "tpot": [(o.deliveries[-1] - o.deliveries[0]) / (o.output_tokens - 1) for o in whole],
        "itl": np.concatenate([np.diff(o.deliveries) for o in whole]),
        "e2el": [o.deliveries[-1] - 10 for o in whole],
        "lateness": [o.lateness for o in whole],
    }
    for name, seconds in oracle.items():
        values = np.asarray(seconds) * 1e3
        p50, p90, p99 = np.percentile(values, (50, 90, 99))
        for statistic, value in zip(
            STATISTICS, (values.mean(), np.median(values), values.std(), p50, p90, p99), strict=True
        ):
            assert got[f"{statistic}_{name}_ms"] == pytest.approx(value)
    assert (got["completed"], got["failed"]) == (137, 1)
    assert got["request_throughput"] == pytest.approx(137 / 20)
    assert got["output_throughput"] == pytest.approx(sum(o.output_tokens for o in whole) / 20)
    tokens = sum(o.output_tokens + o.input_tokens for o in whole)
    assert got["total_token_throughput"] == pytest.approx(tokens / 20)
    assert got["request_goodput"] is None
    assert got["total_cached_tokens"] == 3 * 137


def test_the_names_are_those_of_vllm_bench() -> None:
    got = report([], 0.0, SLO(), "m", Workload(), None).as_json()
    assert got.keys() >= VLLM_NAMES
    assert got.keys() - VLLM_NAMES == {
        "model_id", "num_prompts", "request_rate", "burstiness", "max_concurrency", "seed", "total_cached_tokens",
        *(f"{statistic}_lateness_ms" for statistic in STATISTICS),
    }  # fmt: skip
    assert got["request_rate"] == "inf"
    assert {f"{s}_{name}_ms" for s in STATISTICS for name in LATENCIES} <= got.keys()


def test_goodput_counts_requests_that_keep_every_limit() -> None:
    def goodput(*bounds: str) -> float | None:
        outcomes = [
            Outcome(0, 1.0, [0.1, 0.4, 1.0], output_tokens=3),
            Outcome(0, 0.5, [0.3, 0.5], output_tokens=2),
            Outcome(0, 0.2, [0.2], output_tokens=1),
            Outcome(0, 2.0, error="lost"),
        ]
        return report(outcomes, 0.0, SLO.of(bounds), "m", Workload(), None).request_goodput

    assert goodput() is None
    assert goodput("ttft:1000") == 1.5
    assert goodput("ttft:250") == 1.0
    assert goodput("ttft:250", "itl:300") == 0.5
    assert goodput("tpot:210") == 1.0
    assert goodput("e2el:500") == 1.0
    assert goodput("e2el:0.1") == 0.0


@pytest.mark.parametrize("bound", ["ttft", "ttft:", "ttft:fast", "speed:5", "itl:0", "itl:-1", "itl:nan", "itl:inf"])
def test_an_invalid_slo_is_refused(bound: str) -> None:
    with pytest.raises(ValueError, match=r"an SLO is one of ttft, tpot, itl, e2el"):
        SLO.of([bound])


def test_a_limit_is_within_its_plot_and_what_failed_has_no_latency() -> None:
    workload, slo = Workload(num_prompts=1), SLO(e2el=1.0)
    html = page(report([Outcome(0.0, 2.0, [1.0, 2.0], 3, 2)], 0.0, slo, "tiny", workload, None), "http://a")
    (where,) = re.findall(r'stroke-dasharray="5 4" d="M([-.\d]+) 0V1000"', html)
    assert 0 <= float(where) < 50  # 1 ms, and the request took 2 s
    failed = page(report([Outcome(0.0, 2.0, error="<why>")], 0.0, slo, "<name>", workload, None), "http://a")
    assert "share of" not in failed
    assert "<why>" not in failed
    assert "<name>" not in failed
