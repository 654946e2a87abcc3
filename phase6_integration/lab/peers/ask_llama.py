"""llama.cpp on one file, for `real_models.py`: ask_llama.py MODEL.gguf THREADS, in an environment that setup.sh makes.

Reads a JSON of questions from stdin and writes one of answers: the tokens of texts, the mean negative log-likelihood of
a passage, and the most likely tokens after prompts.
"""

import json
import sys

import llama_cpp
import numpy as np


def answer() -> None:
    file, threads = sys.argv[1:]
    asked = json.load(sys.stdin)
    passage, size = asked["passage"], len(asked["passage"])
    model = llama_cpp.Llama(
        file,
        n_ctx=size + 64,
        n_batch=256,
        logits_all=True,
        n_threads=int(threads),
        n_threads_batch=int(threads),
        verbose=False,
    )
    texts = [model.tokenize(text.encode(), add_bos=False, special=True) for text in asked["texts"]]
    model.eval(passage)
    logits = model.scores[: size - 1].astype(np.float64)
    logits -= logits.max(1, keepdims=True)
    scores = logits[np.arange(size - 1), passage[1:]] - np.log(np.exp(logits).sum(1))
    answers = []
    for prompt in asked["prompts"]:
        model.reset()
        model.eval(prompt)
        said: list[int] = []
        while len(said) < asked["output"]:
            said.append(int(model.scores[model.n_tokens - 1].argmax()))
            model.eval(said[-1:])
        answers.append(said)
    version = f"llama.cpp of llama-cpp-python {llama_cpp.__version__}"
    json.dump({"version": version, "texts": texts, "nll": -float(scores.mean()), "answers": answers}, sys.stdout)


if __name__ == "__main__":
    answer()
