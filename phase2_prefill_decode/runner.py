"""ModelRunner: a batch of slices in, a token for each that completes out. Model over the pool, then sampling."""

from dataclasses import dataclass

from phase0_request.batch import Batch, StepOutput
from phase1_kv_pool.cache import KVCache
from phase1_kv_pool.pool import KVPool
from phase2_prefill_decode.decoder import Decoder
from phase2_prefill_decode.packed import Packed, pack
from phase2_prefill_decode.sampler import Sampled, Sampler
from phase2_prefill_decode.sampling import Sampling
from phase2_prefill_decode.scores import Scored, Scoring, pack_scores, score


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A batch ready to run, and what its requests ask of the tokens drawn for them."""

    packed: Packed
    sampling: Sampling
    drawn: tuple[int, ...]  # the slices that complete, by number
    slices: int
    scoring: Scoring | None = None


class ModelRunner:
    """Runs steps of one model over one pool. What a step mixes is not its concern."""

    def __init__(self, decoder: Decoder, pool: KVPool, cache: KVCache, sampler: Sampler) -> None:
        self.decoder = decoder
        self.pool = pool
        self.cache = cache
        self.sampler = sampler

    def pack(self, batch: Batch) -> PackedStep:
        """Host integers to tensors on the device. The pages must be there: `cache.grow` comes first."""
        drawn = tuple(number for number, piece in enumerate(batch.slices) if piece.completes)
        sampling = self.sampler.pack([batch.slices[number].request for number in drawn])
        scoring = pack_scores(batch, self.pool.device)
        packed = pack(batch, self.cache, self.pool.device, scoring.counts if scoring else ())
        return PackedStep(packed, sampling, drawn, len(batch.slices), scoring)

    # region run
    def launch(self, step: PackedStep) -> Sampled | Scored:
        """Compute, store, draw. On a GPU this returns before any of it has happened."""
        logits = self.decoder(step.packed, self.pool.keys, self.pool.values)
        if step.scoring is None:
            return self.sampler.sample(logits, step.sampling)
        drawn, scored = logits[: step.sampling.rows], logits[step.sampling.rows :]
        return score(scored, step.scoring, self.sampler.sample(drawn, step.sampling))

    def run(self, step: PackedStep) -> StepOutput:
        """The step with its tokens on the host. Slices that stop short of their request's end yield None."""
        return self.launch(step).output(step.drawn, step.slices)

    # endregion
