"""A model before it is loaded: the place of its files, its config, and the number of threads that suit it."""

from dataclasses import replace

from phase0_request.support.machine import cores
from phase2_prefill_decode.connect import config_of
from phase2_prefill_decode.loading.config import ModelConfig
from phase6_integration.engine.connect_engine import processes_for
from phase6_integration.engine.hub import directory_of
from phase6_integration.engine.options import EngineOptions

SMALL = 32 << 20  # bytes of weights: such a model gains little from a second thread


def located(options: EngineOptions) -> tuple[EngineOptions, ModelConfig]:
    """The options with directories for names and with the threads that suit the model, and the model's config."""
    directory = directory_of(options.model, options.revision, options.download_dir)
    config, tokenizer = config_of(directory), options.tokenizer
    if tokenizer is not None:
        tokenizer = str(directory_of(tokenizer, None, options.download_dir, "tokenizer"))
    processes = processes_for(config, options)
    threads = options.threads or max(threads_for(config) // processes, 1)
    return replace(options, model=str(directory), revision=None, tokenizer=tokenizer, threads=threads), config


def threads_for(config: ModelConfig) -> int:
    """The number of CPU threads for a model."""
    return 1 if config.bytes <= SMALL else cores()
