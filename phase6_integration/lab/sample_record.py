"""`python -m phase6_integration.lab sample_record FILE`: a record in which everything happens, of the bundled model.

Chats with two instructions arrive, so they share pages; each asks a second question, which finds its first in the
cache. A long prompt comes between them, one client leaves, and another sends more than its share. The pool is small:
requests wait and are preempted.

With `--first`, the run that the page shows before its engine has done anything, in the pool of `serve --demo`. A
request answers alone. Eight follow, and seven of them begin alike and share pages. Then a long prompt is computed in
chunks beside their decodes. The pool fills: cached pages are evicted, and a request is preempted.
"""

import argparse
from pathlib import Path

from phase0_request.lab.questions import QUESTIONS
from phase0_request.params import SamplingParams
from phase0_request.request import FinishReason, Request
from phase4_radix.prefix_cache import PrefixCache
from phase5_continuous.extras.record.lines import Line, Vocabulary
from phase5_continuous.extras.record.record_file import encoded, recording
from phase5_continuous.extras.record.recorder import Recorder
from phase6_integration.engine.engine import NanoServingEngine
from phase6_integration.lab.demo import INSTRUCTIONS

CHATS, BURST, EVERY = 24, 3, 12  # that many chats, three at once, every so many steps
PAUSE = 5  # steps until a client asks its second question
PARAMS = SamplingParams(max_tokens=48, temperature=0)
ALIKE = 7  # chats of the first run
CROWD, LONG = 22, 38  # the steps of it before which the chats and the long prompt arrive
Message = dict[str, str]


def main(arguments: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m phase6_integration.lab sample_record", description=__doc__)
    p.add_argument("file", type=Path)
    p.add_argument("--pages", type=int, default=44, help="of 16 tokens, in the KV cache (%(default)s)")
    p.add_argument("--first", action="store_true", help="write the run of the page's first screen")
    options = p.parse_args(arguments)
    if options.first:
        return first(options.file)
    engine = NanoServingEngine.from_pretrained(
        kv_cache_pages=options.pages, page_size=16, max_num_seqs=8, max_num_batched_tokens=64, max_chunk_size=48,
        max_model_len=512, threads=1,
    )  # fmt: skip
    core, tokenizer = engine.parts.core, engine.parts.model.tokenizer
    assert tokenizer is not None
    questions = [*QUESTIONS]
    long = "Summarize this: " + " ".join(QUESTIONS.values())
    chats: dict[str, list[dict[str, str]]] = {}
    due: list[tuple[int, str]] = []  # when which chat asks again

    def ask(name: str, question: str, again: int = 0) -> None:
        tokens = tuple(tokenizer.chat([*chats[name], {"role": "user", "content": question}]))
        chats[name].append({"role": "user", "content": question})
        tenant = "batch" if int(name) % 8 > 5 else "people"
        core.submit(Request(f"chat-{name}-{again}", tokens, PARAMS, arrival=core.clock(), tenant=tenant))

    engine.generate([tokenizer.chat([{"role": "user", "content": long}])], PARAMS)  # the first steps are slow
    cache = engine.parts.scheduler.cache
    assert isinstance(cache, PrefixCache)
    cache.reset()
    with engine, recording(core, options.file, tokenizer.label, "tiny_chat"):
        for number in range(2000):
            for _ in range(BURST if number % EVERY == 0 and len(chats) < CHATS else 0):
                name = str(len(chats))
                chats[name] = [{"role": "system", "content": INSTRUCTIONS[len(chats) // BURST % 2]}]
                ask(name, long if name in ("4", "13") else questions[int(name) % len(questions)])
            for time, name in [each for each in due if each[0] <= number]:
                due.remove((time, name))
                ask(name, questions[(int(name) + 5) % len(questions)], 1)
            if number == 30:
                core.abort(next(each.request for each in engine.parts.scheduler.running_set.running))
            step = core.step()
            for request, _, reason, _ in step.events if step is not None else ():
                name, again = request.id.split("-")[1:]
                if reason in (FinishReason.STOP, FinishReason.LENGTH) and again == "0":
                    chats[name].append({"role": "assistant", "content": tokenizer.decode(request.output_tokens)})
                    due.append((number + PAUSE, name))
            if len(chats) == CHATS and not due and not core.has_work:
                break
    return 0


def first(file: Path) -> int:
    """A record with shorter numbers, and steps from 1 on."""
    engine = NanoServingEngine.from_pretrained(
        kv_cache_pages=52, page_size=16, max_num_batched_tokens=96, max_chunk_size=64, threads=1
    )
    core, tokenizer = engine.parts.core, engine.parts.model.tokenizer
    cache = engine.parts.scheduler.cache
    assert tokenizer is not None
    assert isinstance(cache, PrefixCache)
    questions = [*QUESTIONS]
    crowd = [[_said("system", " ".join(INSTRUCTIONS * 2)), _said("user", each)] for each in questions[1 : ALIKE + 1]]
    arrivals: dict[int, list[tuple[list[Message], int]]] = {
        0: [([_said("user", questions[0])], CROWD + 1)],
        CROWD: [([_said("user", questions[-3])], 40), *((chat, 39 + 5 * each % 23) for each, chat in enumerate(crowd))],
        LONG: [([_said("user", "Explain: " + " ".join([*questions[:4], *QUESTIONS.values()]))], 32)],
    }
    engine.generate([tokenizer.chat(crowd[0])], SamplingParams(max_tokens=32))  # the first steps are slow
    cache.reset()
    lines, vocabulary, requests = list[Line](), Vocabulary(tokenizer.label), 0
    with engine:
        recorder = Recorder(core, lambda line: lines.append(vocabulary.add(line)), text=True, model="tiny_chat")
        before = core.steps
        while arrivals or core.has_work:
            for messages, tokens in arrivals.pop(core.steps - before, ()):
                params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0)
                core.submit(Request(f"{requests}", tuple(tokenizer.chat(messages)), params, arrival=core.clock()))
                requests += 1
            core.step()
        recorder.close()
    file.write_text("".join(f"{encoded(_rounded(line, before))}\n" for line in lines), "utf-8")
    print(f"{file}: {len(lines)} lines, {file.stat().st_size} bytes")
    return 0


def _said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _rounded(line: Line, before: int) -> Line:
    """Shorter numbers, and steps that begin with 1."""
    rounded: Line = {"step": line["step"] - before} if "step" in line else {}
    rounded |= {"t": round(line["t"], 4)} if "t" in line else {}
    rounded |= {"ms": [round(part, 2) for part in line["ms"]]} if "ms" in line else {}
    return line | rounded
