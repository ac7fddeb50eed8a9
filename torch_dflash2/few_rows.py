"""Linear layers that take, for each small number of rows, the faster of two ways to compute them on this CPU.

Decoding is linear layers with a few rows: one in plain decoding, a block's in speculative decoding. How well a BLAS does
these varies. On two cores of an AMD EPYC (Zen 3) with MKL, SmolLM2-135M took 1.7 times as long for four rows as for one by
`F.linear`, and 1.05 times the other way round, with one row no slower either. So both are tried when a model is loaded.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TRIED_ROWS = (1, 2, 4, 8, 16)  # numbers of rows between them are computed like the next of these


def usual(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


def transposed(x: Tensor, weight: Tensor) -> Tensor:
    rows = x if len(x) > 1 else x.repeat(2, 1)  # a single row would be a matrix times a vector, which is not the same code
    return (weight @ rows.t())[:, : len(x)].t().contiguous()


class FewRowLinear(nn.Linear):
    """nn.Linear without bias; `ways[n]` computes n rows, if there are that many."""

    ways: list[Callable[[Tensor, Tensor], Tensor]]

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        way = self.ways[len(rows)] if len(rows) < len(self.ways) else usual
        return way(rows, self.weight).view(*x.shape[:-1], self.out_features)


@torch.inference_mode()
def use_few_row_linears(model: nn.Module) -> None:
    """Makes the CPU's linear layers of `model` FewRowLinear, in place; weights and state dict stay as they are.

    Measures for a second or so: call it again when the model's dtype changes.
    """
    shapes: dict[tuple[torch.Size, torch.dtype], list[Any]] = defaultdict(list)
    for module in model.modules():
        if type(module) in (nn.Linear, FewRowLinear) and module.bias is None and module.weight.device.type == "cpu":
            shapes[module.weight.shape, module.weight.dtype].append(module)
    for modules in shapes.values():
        weights = [module.weight for module in modules[:16]]  # in turns, as in a model: none stays in the CPU's cache
        ways: list[Callable[[Tensor, Tensor], Tensor]] = [usual]
        for rows in TRIED_ROWS:
            ways += [_fastest(weights, rows)] * (rows + 1 - len(ways))
        for module in modules:
            module.__class__, module.ways = FewRowLinear, ways


def _fastest(weights: list[Tensor], rows: int) -> Callable[[Tensor, Tensor], Tensor]:
    x = torch.randn(rows, weights[0].shape[1], dtype=weights[0].dtype)
    seconds: dict[Callable[[Tensor, Tensor], Tensor], float] = {}
    for _ in range(2):
        for way in (usual, transposed):
            start = time.perf_counter()
            for weight in weights:
                way(x, weight)
            seconds[way] = min(seconds.get(way, float("inf")), time.perf_counter() - start)
    return min(seconds, key=lambda way: seconds[way])
