"""transformers' `generate` in the comparison: run_transformers.py MODEL THREADS."""

import sys
from typing import Any

import torch
import transformers

from phase6_integration.lab.peers.worker import serve


def main(directory: str, threads: int) -> None:
    torch.set_num_threads(threads)
    model_class: Any = transformers.AutoModelForCausalLM
    config_class: Any = transformers.GenerationConfig
    model = model_class.from_pretrained(directory, dtype=torch.bfloat16).eval()
    model.generation_config = config_class()  # no token of the checkpoint's ends an answer

    def generate(prompts: list[list[int]], output: int) -> list[list[int]]:
        how = config_class(do_sample=False, max_new_tokens=output, eos_token_id=None, pad_token_id=0)
        with torch.inference_mode():
            tokens = torch.tensor(prompts)
            whole = model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=how)
        return [row[len(prompts[0]) :].tolist() for row in whole]

    serve({"version": transformers.__version__, "features": torch.backends.cpu.get_cpu_capability()}, generate)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
