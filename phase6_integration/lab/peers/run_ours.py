"""This engine in the comparison: run_ours.py MODEL THREADS TOKENS [FIELD=VALUE ...], with fields of EngineOptions."""

import sys

from phase0_request.params import SamplingParams
from phase0_request.support.machine import describe
from phase1_kv_pool.extras.layer_groups import LayerGroups
from phase2_prefill_decode.connect import config_of
from phase6_integration.engine.engine import NanoServingEngine
from phase6_integration.lab.peers.worker import serve

PAGE_SIZE = 16


def main(model: str, threads: int, tokens: int, **options: str) -> None:
    groups = LayerGroups.of(config_of(model).windows)
    pages = 2 * tokens // PAGE_SIZE * (groups.count if groups else 1)  # each group of layers has pages of its own
    cache = {"kv_cache_pages": pages, "max_model_len": tokens}
    engine = NanoServingEngine.from_pretrained(model, threads=threads, **cache, **options)

    def generate(prompts: list[list[int]], output: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        return [completion.output_tokens for completion in engine.generate(prompts, params)]

    serve({"features": describe().vectors or ""}, generate)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), **dict(field.split("=") for field in sys.argv[4:]))
