"""Experts: a router chooses a few of many MLPs for each token.

A token is one row for each expert that it goes through. Rows of an expert are brought together, so that one grouped
product computes all experts: a step reads the weights of those that some row has, and of no others.
"""

from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, softmax

from phase0_request.support.checks import ConfigError
from phase2_prefill_decode.backend import Backend
from phase2_prefill_decode.decoder import MLP
from phase2_prefill_decode.extras.families.layer import ROUTER, SHARED_EXPERT, Experts
from phase2_prefill_decode.extras.linears import Compiled, Joined
from phase2_prefill_decode.linear import Linear, TorchLinear
from phase2_prefill_decode.loading.weights import LayerWeights

PRODUCTS = "gate_up_proj", "down_proj"


class GroupedProduct(Protocol):
    """Multiplies each row with the matrix of its group. Rows of a group are neighbours."""

    def __call__(self, rows: Tensor, ends: Tensor, /) -> Tensor:
        """rows: [rows, in]; ends: [groups] int32, on the device, the index after each group's last row; result: [rows,
        out]."""


def grouped_reference(weight: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """The product in plain torch, which defines the result. weight: [groups, out, in]. The host does not read `ends`,
    so every row is multiplied with every matrix, and keeps the product with its own."""
    places, starts = torch.arange(len(rows), device=rows.device), torch.cat((ends.new_zeros(1), ends[:-1]))
    result = rows.new_zeros(len(rows), weight.shape[1])
    for start, end, matrix in zip(starts, ends, weight, strict=True):
        own = (places >= start) & (places < end)
        result = torch.where(own[:, None], linear(rows, matrix), result)
    return result


def grouped(product: Linear, groups: int, device: torch.device) -> GroupedProduct:
    """The fastest grouped product for the matrices of all groups, stacked in one."""
    if isinstance(product, Joined):
        raise ConfigError("experts of one matrix must have one format, with one order of their inputs")
    if device.type == "cuda":
        from phase2_prefill_decode.extras.quantized.triton_grouped import on_gpu

        return on_gpu(product, groups)
    if isinstance(product, TorchLinear):
        return partial(grouped_reference, product.weight.view(groups, -1, product.weight.shape[1]))
    from phase2_prefill_decode.extras.cpu.experts import PackedGroups
    from phase2_prefill_decode.extras.cpu.product import PackedWeight

    assert isinstance(product, PackedWeight)  # no other backend serves a CPU
    return PackedGroups(product, groups)


class RoutedExperts:
    """The experts of a layer, as one linear layer that routes each token to the experts it chose."""

    def __init__(self, experts: Experts, weights: LayerWeights, backend: Backend) -> None:
        self.experts = experts
        products = [backend.linear(weights[name], None) for name in PRODUCTS]
        self._router = backend.linear(weights[ROUTER], weights.get(f"{ROUTER}_bias"))
        self._shared = SharedExpert(weights, backend) if experts.shared else None
        biases = [weights.get(f"{name}_bias") for name in PRODUCTS]
        self._biases = [None if bias is None else bias.view(experts.number, -1) for bias in biases]
        device = next(tensor.device for tensor in weights.values() if isinstance(tensor, Tensor))
        groups = [grouped(product, experts.number, device) for product in products]
        self._gate_up, self._down = groups
        own: list[Any] = [g if isinstance(g, Compiled) else each for g, each in zip(groups, products, strict=True)]
        self.linears = [self._router, *own, *(() if self._shared is None else self._shared.linears)]
        self.ends = torch.zeros(experts.number, dtype=torch.int32, device=device)  # of the latest step
        self._swiglu, self.kernel = backend.swiglu, products[-1].kernel

    # region exercise 10.3
    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each token, and the share of each in its result: [tokens, top_k]."""
        shares, chosen = softmax(self._router(x), -1, dtype=torch.float32).topk(self.experts.top_k)
        return chosen, shares / shares.sum(-1, keepdim=True) if self.experts.norm_topk else shares

    # endregion

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        chosen, shares = self.route(x)
        # region exercise 10.3
        ordered, order = chosen.flatten().sort(stable=True)
        groups = torch.arange(self.experts.number, device=x.device)
        ends = torch.searchsorted(ordered, groups, right=True, out_int32=True, out=self.ends)
        # endregion
        rows = x[order // self.experts.top_k]
        of_gate_up, of_down = self._biases
        inner = self._swiglu(with_bias(self._gate_up(rows, ends), of_gate_up, ordered))
        found = with_bias(self._down(inner, ends), of_down, ordered)
        by_token = torch.empty_like(found).index_copy_(0, order, found).view(*chosen.shape, found.shape[1])
        result = (by_token * shares[..., None]).sum(1).to(x.dtype)
        result = result if self._shared is None else result + self._shared(x)
        return result if out is None else out.copy_(result)


def with_bias(rows: Tensor, bias: Tensor | None, experts: Tensor) -> Tensor:
    """Each row with the bias of its expert. bias: [groups, out]"""
    return rows if bias is None else rows.add_(bias[experts])


class SharedExpert:
    """An MLP that every token goes through, beside those that it chose. A gate says how much of its result counts."""

    def __init__(self, weights: LayerWeights, backend: Backend) -> None:
        own = {
            name.removeprefix(SHARED_EXPERT): weight
            for name, weight in weights.items()
            if name.startswith(SHARED_EXPERT)
        }
        self._mlp, self._gate = MLP(own, backend), backend.linear(own["gate"], None)
        self.linears = [self._mlp.gate_up_proj, self._mlp.down_proj, self._gate]

    def __call__(self, x: Tensor) -> Tensor:
        return self._mlp(x) * self._gate(x).sigmoid()


class ExpertMLP(MLP):
    """An MLP of experts. What follows the last product of an MLP, as a sum over ranks, follows all of theirs."""

    def __init__(self, experts: Experts, weights: LayerWeights, backend: Backend) -> None:
        self.down_proj = RoutedExperts(experts, weights, backend)
        self.ends = self.down_proj.ends

    def __call__(self, x: Tensor) -> Tensor:
        return self.down_proj(x)


def mlp_of(experts: Experts | None, weights: LayerWeights, backend: Backend) -> MLP:
    """The MLP of a layer, or its experts."""
    return MLP(weights, backend) if experts is None else ExpertMLP(experts, weights, backend)


def linears_of_mlp(mlp: MLP) -> list[Linear]:
    """The linear layers of an MLP."""
    return [mlp.down_proj] if isinstance(mlp, ExpertMLP) else [mlp.gate_up_proj, mlp.down_proj]
