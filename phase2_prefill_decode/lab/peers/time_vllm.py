"""Times vLLM's CPU build on the workloads of the comparison: time_vllm.py MODEL_DIR. Started by run.sh."""

import os
import random
import sys
import time
from importlib.metadata import version

WORKLOADS = ((1, 16, 64), (8, 128, 64), (16, 128, 64), (4, 512, 1))  # requests, prompt tokens, output tokens
RUNS = 3  # the first warms up, the best of the others counts
FIRST, LAST = 10, 7900  # token ids of the prompts


def main(directory: str) -> None:
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "4", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"  # it would log to stdout, which has the results
    from vllm import LLM, SamplingParams

    engine = LLM(
        directory, skip_tokenizer_init=True, max_model_len=2048, max_num_seqs=64, dtype="bfloat16",
        enable_prefix_caching=False,
    )  # fmt: skip
    print(f"vLLM version {version('vllm-cpu')}", flush=True)
    rng = random.Random(0)
    for requests, prompt, output in WORKLOADS:
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
        best = float("inf")
        for run in range(RUNS):
            prompts = [{"prompt_token_ids": [rng.randint(FIRST, LAST) for _ in range(prompt)]} for _ in range(requests)]
            start = time.perf_counter()
            answers = engine.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - start
            assert all(len(answer.outputs[0].token_ids) == output for answer in answers)
            best = min(best, seconds) if run else best
        print(f"requests={requests} prompt={prompt} output={output}: {best:.3f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
