"""`python -m phase6_integration`: all seven phases as one engine, on the bundled model.

Every prompt begins with one of two instructions, so their pages are shared. The pool is small, so requests wait.
"""

import argparse
from itertools import islice

from rich.console import Console

from phase0_request.lab.questions import QUESTIONS
from phase0_request.lab.viewer import Recording
from phase0_request.params import SamplingParams
from phase0_request.request import Request
from phase6_integration.engine.engine import NanoServingEngine

INSTRUCTIONS = (
    "You are a careful assistant. You answer questions about serving language models in one plain sentence.",
    "You teach newcomers. Your answers are short and friendly, and they name things by their usual names.",
)


def main(arguments: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m phase6_integration", description=__doc__)
    p.add_argument("-n", "--requests", type=int, default=len(QUESTIONS), help="(%(default)s, which is the most)")
    p.add_argument("--max-running", type=int, default=6, help="requests (%(default)s)")
    p.add_argument("--pages", type=int, default=48, help="of 16 tokens, in the KV cache (%(default)s)")
    options, console = p.parse_args(arguments), Console(highlight=False)
    params, recording = SamplingParams(max_tokens=48, temperature=0), Recording()
    try:
        engine = NanoServingEngine.from_pretrained(
            kv_cache_pages=options.pages, page_size=16, max_num_seqs=options.max_running, max_num_batched_tokens=64,
            max_chunk_size=48, max_model_len=512, threads=1,
        )  # fmt: skip
    except ValueError as error:
        p.error(str(error))
    with engine:
        tokenizer = engine.parts.model.tokenizer
        assert tokenizer is not None
        requests, cached = list[Request](), dict[str, int]()
        for number, question in enumerate(islice(QUESTIONS, options.requests)):
            system = {"role": "system", "content": INSTRUCTIONS[number % 2]}
            prompt = tokenizer.chat([system, {"role": "user", "content": question}])
            requests.append(engine.add_request(prompt, params))
        while engine.has_work:
            step = engine.step()
            if step is not None and step.batch:
                recording.add(step, requests)
                for request, start, *_ in step.batch:
                    cached.setdefault(request.id, start)
        stats = engine.get_stats()
    recording.show(console, f"{len(requests)} requests, {options.pages} pages, at most {options.max_running} running")
    for question, request in zip(QUESTIONS, requests, strict=False):
        found = f"{cached[request.id]} of {len(request.prompt_tokens)} prompt tokens were cached"
        console.print(f"\n{question}  [dim]({found})[/dim]\n{tokenizer.decode(request.output_tokens)}")
    console.print(
        f"\n{stats['cache_hit_rate']:.0%} of the prompt tokens were cached; {stats['preemptions']} preemptions; "
        f"mean TTFT {stats['mean_ms']['ttft']:.1f} ms, ITL {stats['mean_ms']['itl']:.1f} ms"
    )
    return 0
