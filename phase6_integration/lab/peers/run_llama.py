"""llama.cpp in the comparison: run_llama.py MODEL.gguf THREADS TOKENS, in an environment that setup.sh makes.

It drives the C interface: a batch of tokens with the sequence and the position of each, as a server does. The KV cache
of the newest prompts stays, as with the prefix cache of a server.
"""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import llama_cpp
import numpy as np

from phase6_integration.lab.peers.worker import serve

BATCH, UBATCH, SEQUENCES = 2048, 512, 16  # tokens of a call and of a step in it, and sequences: most


class Token(NamedTuple):
    """A token to compute. The last one of a prompt and each decode need logits."""

    id: int
    position: int
    sequence: int
    needs_logits: bool


class Engine:
    """A model, and a context for sixteen sequences."""

    def __init__(self, file: str, threads: int, tokens: int) -> None:
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
        params: Any = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = max(tokens, BATCH), BATCH, UBATCH, SEQUENCES
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified, params.flash_attn_type = True, llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch: Any = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self.cached: list[list[int]] = []

    def generate(self, prompts: list[list[int]], output: int) -> list[list[int]]:
        start = len(prompts[0]) - 1 if prompts == self.cached else 0
        if start:
            llama_cpp.llama_memory_seq_rm(self.memory, -1, start, -1)
        else:  # also of models with states, which go as a whole
            llama_cpp.llama_memory_clear(self.memory, True)
        last = len(prompts[0]) - 1
        tokens = [
            Token(id, position, sequence, position == last)
            for sequence, prompt in enumerate(prompts)
            for position, id in enumerate(prompt[start:], start)
        ]
        newest: dict[int, int] = {}
        for at in range(0, len(tokens), BATCH):
            newest |= self.step(tokens[at : at + BATCH])
        answers = {sequence: [id] for sequence, id in newest.items()}
        for position in range(last + 1, last + output):
            newest = self.step([Token(id, position, sequence, True) for sequence, id in newest.items()])
            for sequence, id in newest.items():
                answers[sequence].append(id)
        self.cached = prompts
        return list(answers.values())

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


def quantize(source: str, target: str, kind: str) -> None:
    """Write the model of a file as a file of a kind such as Q4_K_M."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    if llama_cpp.llama_model_quantize(source.encode(), target.encode(), params):
        raise RuntimeError(f"{source} could not be quantized to {kind}")


def main(file: str, threads: int, tokens: int) -> None:
    features = llama_cpp.llama_print_system_info().decode()
    serve({"version": llama_cpp.__version__, "features": features}, Engine(file, threads, tokens).generate)


if __name__ == "__main__":
    if sys.argv[1] == "--quantize":
        quantize(*sys.argv[2:])
    else:
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
