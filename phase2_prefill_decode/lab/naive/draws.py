"""`python -m phase2_prefill_decode.lab naive.draws`: the tokens of a request, alone and beside another."""

import argparse
from collections.abc import Sequence

import torch
from rich.console import Console
from torch import Tensor

from phase0_request.lab.report import table

TOKENS = 8  # drawn by each


# region draws
def by_generator(logits: Tensor, generator: torch.Generator) -> Tensor:
    """A token for each row. All rows take their random numbers from one generator, in turn."""
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


def by_race(logits: Tensor, seeds: Sequence[int], position: int) -> Tensor:
    """A token for each row, by the Gumbel maximum. The random numbers of a row are its own."""
    own = [torch.Generator().manual_seed(1_000_003 * seed + position) for seed in seeds]
    times = -torch.stack([torch.rand(logits.shape[1], generator=each) for each in own]).log()  # Exp(1)
    return (logits - times.log()).argmax(-1)


# endregion


def drawn(way: str, rows: int) -> list[int]:
    """The tokens that the last of some rows draws, one after the other. All rows have the same logits."""
    logits = torch.randn(32, generator=torch.Generator().manual_seed(0)).expand(rows, -1)
    shared, seeds = torch.Generator().manual_seed(7), [*range(8, 7 + rows), 7]
    return [
        int((by_generator(logits, shared) if way == "one generator" else by_race(logits, seeds, position))[-1])
        for position in range(TOKENS)
    ]


def main(arguments: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m phase2_prefill_decode.lab naive.draws", description=__doc__)
    p.parse_args(arguments)
    ways, names = ("one generator", "a race"), ("by", "alone", "beside another request")
    shown = [(way, *(" ".join(map(str, drawn(way, rows))) for rows in (1, 2))) for way in ways]
    Console(highlight=False).print(table(names, shown, title="The tokens that a request with seed 7 draws"))
    return 0
