"""The ledger: what each optimization gains, where it loses, and what it costs in lines, from the results."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from chapters.claims import figures

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "chapters" / "results"
FIGURE = re.compile(r"\{([\w-]+\.json)#(\S+) (\S+)\}")


@dataclass(frozen=True)
class Entry:
    """An optimization. `{file.json#key FORMAT}` in a text is a figure of a result; `files` are the modules that would
    not be there without it."""

    name: str
    chapter: str
    gain: str
    loses: str
    trap: str
    files: tuple[str, ...]

    @property
    def lines(self) -> int:
        """The lines of its modules, without blank lines and comments."""
        lines = (line.strip() for file in self.files for line in (ROOT / file).read_text("utf-8").split("\n"))
        return sum(bool(line) and not line.startswith("#") for line in lines)


ENTRIES = (
    Entry(
        "Pages",
        "01_kv_pool",
        "{fragmentation.json#policies.pages_16.mean_running .0f} requests run at once in the memory in which "
        "{fragmentation.json#policies.contiguous_max.mean_running .0f} contiguous ones do",
        "a request wastes {fragmentation.json#policies.pages_16.waste_per_request .1f} tokens in pages of 16, and "
        "{fragmentation.json#policies.pages_256.waste_per_request .0f} in pages of 256",
        "an address in 32 bits overflows in a large pool",
        ("phase1_kv_pool/allocator.py", "phase1_kv_pool/cache.py"),
    ),
    Entry(
        "Chunked prefill",
        "03_chunked_prefill",
        "a prompt of {stall.json#scene.prompt ,d} tokens stalls the others for "
        "{stall.json#outcomes.chunk_256.worst_gap_ms .0f} ms, and uncut for "
        "{stall.json#outcomes.whole.worst_gap_ms ,.0f} ms",
        "its own first token comes {stall.json#outcomes.chunk_256.later_first_token .0%} later; in chunks of 64, "
        "{stall.json#outcomes.chunk_64.later_first_token .0%}",
        "a token sampled after a chunk in the middle of a prompt",
        ("phase3_chunked_prefill/budget.py", "phase3_chunked_prefill/chunker.py"),
    ),
    Entry(
        "Prefix cache",
        "04_radix",
        "with a shared prompt, the first token comes after {phase4.json#served.on.ttft_ms .0f} ms instead of "
        "{phase4.json#served.off.ttft_ms .0f} ms",
        "nothing without a common prefix ({phase4.json#common.tokens_0.ttft_ms .0f} ms and "
        "{phase4.json#common.tokens_0.plain_ttft_ms .0f} ms); requests that arrive together each compute the prefix, "
        "until chapter 5 lets the others wait",
        "a page that is evicted while a request reads it",
        (
            "phase4_radix/radix_tree.py",
            "phase4_radix/eviction.py",
            "phase4_radix/prefix_cache.py",
            "phase4_radix/page_keys.py",
        ),
    ),
    Entry(
        "Continuous batching",
        "05_continuous",
        "{ladder.json#rungs.phase5.tokens_per_second .0f} tokens/s instead of "
        "{ladder.json#rungs.phase4.tokens_per_second .0f}, and a first token after "
        "{ladder.json#rungs.phase5.ttft_p50_ms .0f} ms instead of {ladder.json#rungs.phase4.ttft_p50_ms ,.0f}",
        "a token of an answer takes {ladder.json#rungs.phase5.itl_mean_ms .0f} ms instead of "
        "{ladder.json#rungs.phase4.itl_mean_ms .0f}, because more requests share a step",
        "two requests that preempt each other without end",
        ("phase5_continuous/scheduler.py", "phase5_continuous/running.py", "phase5_continuous/admission.py"),
    ),
    Entry(
        "A process of its own",
        "06_integration",
        "{phase6_hosts.json#process.tokens_per_second ,.0f} tokens/s instead of "
        "{phase6_hosts.json#thread.tokens_per_second ,.0f} in a thread",
        "the HTTP event loop is late by up to {phase6_hosts.json#process.late_most_ms .0f} ms, and in a thread by "
        "{phase6_hosts.json#thread.late_most_ms .0f} ms",
        "a message that is read in two parts",
        ("phase6_integration/process/messages.py", "phase6_integration/process/engine_process.py"),
    ),
    Entry(
        "One step ahead",
        "07_fast",
        "a step of 256 on an {phase6_overlap.json#gpu s} takes {phase6_overlap.json#batch_256_ahead_1.step_ms .1f} ms "
        "instead of {phase6_overlap.json#batch_256_ahead_0.step_ms .1f} ms",
        "the device is idle for {phase6_overlap.json#batch_64_ahead_0.idle_share .0%} of a step of 64 without it, so "
        "there is less to gain; a request that has stopped computes one token more",
        "a page that is freed while a step in flight writes to it",
        ("phase2_prefill_decode/step/device_state.py",),
    ),
    Entry(
        "Fair queueing",
        "05_continuous",
        "the longest wait of a modest client for a first token is "
        "{phase5_fairness.json#served.fair_queueing.ttft_max_ms .0f} ms instead of "
        "{phase5_fairness.json#served.one_queue.ttft_max_ms ,.0f} ms",
        "{phase5_fairness.json#served.fair_queueing.preemptions d} preemptions instead of "
        "{phase5_fairness.json#served.one_queue.preemptions d}",
        "a client that was away comes back with credit for all that time",
        ("phase5_continuous/extras/fairness.py",),
    ),
    Entry(
        "Drafts from the text",
        "11_speculation",
        "one request whose answer was given before runs {speculation.json#asked_again_1.ratio .1f} times as fast",
        "with 16 requests {speculation.json#asked_again_16.ratio .2f} times; for one with a new text "
        "{speculation.json#new_1.ratio .2f} times",
        "a draft that is accepted because it is likely, not because it would have been drawn",
        (
            "phase5_continuous/extras/speculation/ngram.py",
            "phase5_continuous/extras/speculation/speculation.py",
            "phase2_prefill_decode/extras/verification.py",
        ),
    ),
    Entry(
        "Forced tokens",
        "08_constrained",
        "an object of a schema takes {constrained.json#served.forced_1.ms_per_token .2f} ms per token instead of "
        "{constrained.json#served.all_drawn_1.ms_per_token .2f} ms",
        "nothing where the grammar leaves a choice at every token",
        "forced text, cut into tokens in a way that the model has never seen",
        ("phase2_prefill_decode/extras/grammar/constraints.py",),
    ),
    Entry(
        "Weights in 4 bits",
        "09_fits_in_memory",
        "a model of 596 million parameters decodes {peers.json#native.596m.8x128+32.ours_Q4_0.median .0f} tokens/s for "
        "eight requests on a CPU instead of {peers.json#native.596m.8x128+32.ours.median .0f}",
        "with one scale per row, logits move by {quantized.json#int4_nearest_row.logits .2f}; in groups of 32, by "
        "{quantized.json#int4_nearest_32.logits .2f}",
        "a scale that one large number makes too coarse for all others",
        ("phase2_prefill_decode/extras/quantized/quantize.py", "phase2_prefill_decode/extras/quantized/weight.py"),
    ),
)


def ledger() -> list[str]:
    """The table. Lines are in tens, so that a small change of a module rarely changes it."""
    lines = ["", "| what | gains | loses | lines | the trap |", "|---|---|---|---|---|"]
    for each in ENTRIES:
        gain, loses, count = _filled(each.gain), _filled(each.loses), math.ceil(each.lines / 10) * 10
        lines.append(f"| [{each.name}]({each.chapter}.md) | {gain} | {loses} | {count} | {each.trap} |")
    return lines


def _filled(text: str) -> str:
    return FIGURE.sub(lambda match: format(figures(RESULTS / match[1], match[2])[0], match[3]), text)
