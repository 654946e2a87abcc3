"""Train the bundled model: transformers' Qwen3 class, AdamW, a cosine.

python -m chapters.tiny_chat.train                          # under an hour on two cores
python -m chapters.tiny_chat.train --drafter --out drafter  # a model of a tenth its size that drafts for it, in minutes
"""

import argparse
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div
from tqdm import tqdm
from transformers import Qwen3Config, Qwen3ForCausalLM

from chapters.tiny_chat.corpus import read
from chapters.tiny_chat.lessons import IGNORED, Lessons, batches
from phase0_request.tokenizer import BUNDLED, Tokenizer

SEED = 20
STEPS, DRAFTER_STEPS = 7000, 3000
BATCH_TOKENS = 2048
LONGEST = 1024
PEAK_RATE = 2.5e-3
WARM_UP = 200
DECAY = 0.05


# 4.2 million parameters, a quarter of them the embeddings, which are tied; and 0.6 million, two thirds embeddings
CHAT = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 64}
DRAFTER = {
    "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32,
}  # fmt: skip


def shape(tokenizer: Tokenizer, sizes: Mapping[str, Any]) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=tokenizer.vocab_size,
        **sizes,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=sorted(tokenizer.eos_ids, reverse=True),
        pad_token_id=0,
    )


def rate(step: int, steps: int) -> float:
    """The learning rate: up in a line, down along a cosine to a fiftieth."""
    if step < WARM_UP:
        return PEAK_RATE * (step + 1) / WARM_UP
    done = (step - WARM_UP) / max(steps - WARM_UP, 1)
    return PEAK_RATE * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def logits_of(model: Qwen3ForCausalLM, inputs: Tensor, wanted: Tensor) -> Tensor:
    """Only the rows that are to be learned go through the vocabulary."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model.lm_head(model.model(inputs).last_hidden_state[wanted]).float()  # type: ignore[no-any-return]


def loss_of(model: Qwen3ForCausalLM, inputs: Tensor, targets: Tensor, teacher: Qwen3ForCausalLM | None) -> Tensor:
    """How far the model is from the texts, or from its teacher, whose probabilities say more than one right token."""
    wanted = targets != IGNORED
    logits = logits_of(model, inputs, wanted)
    if teacher is None:
        return cross_entropy(logits, targets[wanted])
    with torch.no_grad():
        taught = logits_of(teacher, inputs, wanted).log_softmax(-1)
    return kl_div(logits.log_softmax(-1), taught, reduction="batchmean", log_target=True)


def train(steps: int, seed: int, out: Path, teacher: Path | None = None) -> dict[str, object]:
    """Train from nothing and save in Hugging Face layout; with a `teacher`, a drafter for it. Returns what it took."""
    torch.manual_seed(seed)
    tokenizer = Tokenizer.from_pretrained()
    taught_by = None if teacher is None else Qwen3ForCausalLM.from_pretrained(teacher, dtype=torch.bfloat16)
    model = Qwen3ForCausalLM(shape(tokenizer, CHAT if teacher is None else DRAFTER)).train()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.98), fused=True)
    course = batches(Lessons(read(), tokenizer, seed), BATCH_TOKENS, LONGEST)
    began, used, seen, smooth = time.perf_counter(), time.process_time(), 0, math.log(tokenizer.vocab_size)
    for step in (bar := tqdm(range(steps), "training")):
        inputs, targets = next(course)
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        loss = loss_of(model, inputs, targets, taught_by)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen += inputs.numel()
        smooth += 0.02 * (loss.item() - smooth)
        bar.set_postfix_str(f"loss {smooth:.3f}")
    took = {
        "steps": steps,
        "tokens": seen,
        "loss": round(smooth, 4),
        "minutes": round((time.perf_counter() - began) / 60, 1),
        "core_minutes": round((time.process_time() - used) / 60, 1),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    model.to(torch.bfloat16).save_pretrained(out)
    return took


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m chapters.tiny_chat.train", description=__doc__)
    p.add_argument("--drafter", action="store_true", help="a smaller one that drafts for the bundled model")
    p.add_argument("--steps", type=int, help=f"({STEPS}, of a drafter {DRAFTER_STEPS})")
    p.add_argument("--seed", type=int, default=SEED)
    p.add_argument("--out", type=Path, help="its directory (the bundled model's)")
    options = p.parse_args()
    if options.drafter and options.out is None:
        p.error("--drafter needs --out, a directory for it")
    steps = options.steps or (DRAFTER_STEPS if options.drafter else STEPS)
    print(json.dumps(train(steps, options.seed, options.out or BUNDLED, BUNDLED if options.drafter else None)))


if __name__ == "__main__":
    main()
