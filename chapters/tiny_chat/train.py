"""Train the bundled model: transformers' Qwen3 class, AdamW, a cosine.

python -m chapters.tiny_chat.train        # under an hour on two cores
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import Qwen3Config, Qwen3ForCausalLM

from chapters.tiny_chat.corpus import read
from chapters.tiny_chat.lessons import IGNORED, Lessons, batches
from phase0_request.tokenizer import BUNDLED, Tokenizer

SEED = 20
STEPS = 7000
BATCH_TOKENS = 2048
LONGEST = 1024
PEAK_RATE = 2.5e-3
WARM_UP = 200
DECAY = 0.05


def shape(tokenizer: Tokenizer) -> Qwen3Config:
    """4.2 million parameters, a quarter of them the embeddings, which are tied."""
    return Qwen3Config(
        vocab_size=tokenizer.vocab_size,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
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


def loss_of(model: Qwen3ForCausalLM, inputs: Tensor, targets: Tensor) -> Tensor:
    """Only the rows that are to be learned go through the vocabulary."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(inputs).last_hidden_state
        wanted = targets != IGNORED
        logits = model.lm_head(hidden[wanted])
    return cross_entropy(logits.float(), targets[wanted])


def train(steps: int, seed: int, out: Path) -> dict[str, object]:
    """Train from nothing and save in Hugging Face layout. Returns what it took."""
    torch.manual_seed(seed)
    tokenizer = Tokenizer.from_pretrained()
    model = Qwen3ForCausalLM(shape(tokenizer)).train()
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
        loss = loss_of(model, inputs, targets)
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
    p.add_argument("--steps", type=int, default=STEPS)
    p.add_argument("--seed", type=int, default=SEED)
    p.add_argument("--out", type=Path, default=BUNDLED)
    options = p.parse_args()
    print(json.dumps(train(options.steps, options.seed, options.out)))


if __name__ == "__main__":
    main()
