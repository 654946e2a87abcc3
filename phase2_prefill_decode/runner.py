"""ModelRunner: runs a batch of slices through the model, and samples a token for each slice that completes."""

from dataclasses import dataclass, replace

from phase0_request.batch import Batch, StepOutput
from phase1_kv_pool.cache import KVCache
from phase1_kv_pool.pool import KVPool
from phase2_prefill_decode.decoder import Decoder
from phase2_prefill_decode.logprobs import PromptTargets, pack_prompt_targets, prompt_logprobs_of
from phase2_prefill_decode.packed import Packed, pack
from phase2_prefill_decode.sampler import Sampled, Sampler
from phase2_prefill_decode.sampling import SamplingMetadata


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A batch as tensors, with what its requests ask of the sampler."""

    packed: Packed
    sampling: SamplingMetadata
    drawn: tuple[int, ...]  # the numbers of the slices that complete
    slices: int
    prompt: PromptTargets | None = None


class ModelRunner:
    """Runs steps of one model over one pool, in any mixture of slices."""

    def __init__(self, decoder: Decoder, pool: KVPool, cache: KVCache, sampler: Sampler) -> None:
        self.decoder = decoder
        self.pool = pool
        self.cache = cache
        self.sampler = sampler

    def pack(self, batch: Batch) -> PackedStep:
        """Copy a batch to the device. Its pages must be allocated: `cache.grow` comes first."""
        drawn = tuple(number for number, piece in enumerate(batch.slices) if piece.completes)
        sampling = self.sampler.pack([batch.slices[number].request for number in drawn])
        prompt = pack_prompt_targets(batch, self.pool.device)
        packed = pack(batch, self.cache, self.pool.device, prompt.counts if prompt else ())
        return PackedStep(packed, sampling, drawn, len(batch.slices), prompt)

    # region run
    def launch(self, step: PackedStep) -> Sampled:
        """Run the model and sample. On a GPU this returns before the work is done."""
        logits = self.decoder(step.packed, self.pool.keys, self.pool.values)
        if step.prompt is None:
            return self.sampler.sample(logits, step.sampling)
        sampled = self.sampler.sample(logits[: step.sampling.rows], step.sampling)
        return replace(sampled, prompt_logprobs=prompt_logprobs_of(logits[step.sampling.rows :], step.prompt))

    def run(self, step: PackedStep) -> StepOutput:
        """Run a step and wait for its tokens. A slice that does not complete its request has None."""
        return self.launch(step).output(step.drawn, step.slices)

    # endregion
