"""Times llama.cpp on the workloads of the comparison: time_llama.py MODEL.gguf THREADS. Started by run.sh.

It drives the C interface: a batch of tokens with the sequence and the position of each, as a server does.
"""

import random
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import llama_cpp
import numpy as np

WORKLOADS = ((1, 16, 64), (8, 128, 64), (16, 128, 64), (4, 512, 1))  # requests, prompt tokens, output tokens
RUNS = 3  # the first warms up, the best of the others counts
FIRST, LAST = 10, 7900  # token ids of the prompts
BATCH, CONTEXT = 2048, 8192  # tokens in a call, and in all sequences


class Token(NamedTuple):
    """A token to compute. The last one of a prompt and each decode need logits."""

    id: int
    position: int
    sequence: int
    needs_logits: bool


class Engine:
    """A model, and a context for sixteen sequences."""

    def __init__(self, file: str, threads: int) -> None:
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
        params: Any = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = CONTEXT, BATCH, 512, 16
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified, params.flash_attn_type = True, 1
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch: Any = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def step(self, tokens: Sequence[Token]) -> dict[int, int]:
        """Compute tokens; the most likely next one of each sequence that asked for logits."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for row, token in enumerate(tokens):
            batch.token[row], batch.pos[row], batch.n_seq_id[row] = token.id, token.position, 1
            batch.seq_id[row][0], batch.logits[row] = token.sequence, token.needs_logits
        if llama_cpp.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        return {token.sequence: self._best(row) for row, token in enumerate(tokens) if token.needs_logits}

    def _best(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())


def generate(engine: Engine, requests: int, prompt: int, output: int, rng: random.Random) -> float:
    """Seconds for all outputs, with the prompts computed."""
    tokens = [
        Token(rng.randint(FIRST, LAST), position, sequence, position == prompt - 1)
        for sequence in range(requests)
        for position in range(prompt)
    ]
    engine.clear()
    start = time.perf_counter()
    newest: dict[int, int] = {}
    for at in range(0, len(tokens), BATCH):
        newest |= engine.step(tokens[at : at + BATCH])
    for position in range(prompt, prompt + output - 1):
        newest = engine.step([Token(id, position, sequence, True) for sequence, id in newest.items()])
    return time.perf_counter() - start


def main(file: str, threads: int) -> None:
    engine, rng = Engine(file, threads), random.Random(0)
    print(f"llama-cpp-python version {llama_cpp.__version__}", flush=True)
    for requests, prompt, output in WORKLOADS:
        times = [generate(engine, requests, prompt, output, rng) for _ in range(RUNS)]
        print(f"requests={requests} prompt={prompt} output={output}: {min(times[1:]):.3f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
