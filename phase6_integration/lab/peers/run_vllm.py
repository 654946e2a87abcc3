"""vLLM's CPU build in the comparison: run_vllm.py MODEL THREADS TOKENS, in an environment that setup.sh makes."""

import os
import sys
from importlib.metadata import version

from phase6_integration.lab.peers.worker import serve


def main(directory: str, tokens: int) -> None:
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "4", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"  # it would log to stdout, which has the results
    import torch
    from vllm import LLM, SamplingParams

    engine = LLM(directory, skip_tokenizer_init=True, max_model_len=tokens, max_num_seqs=64, dtype="bfloat16")

    def generate(prompts: list[list[int]], output: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(answer.outputs[0].token_ids) for answer in engine.generate(asked, params, use_tqdm=False)]

    serve({"version": version("vllm-cpu"), "features": torch.backends.cpu.get_cpu_capability()}, generate)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[3]))
