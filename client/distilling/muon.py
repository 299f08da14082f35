"""Muon: momentum whose steps are made orthogonal (Jordan, 2024; Liu et al., 2502.16982), for matrices of layers.

A draft head learns several times as fast by it as by AdamW. torch has it since 2.9; this project takes older ones, too.
"""

import torch
from torch import Tensor


class Muon(torch.optim.Optimizer):
    """Takes matrices alone. A step has the root mean square that AdamW's steps have, so that learning rates compare."""

    def __init__(
        self, matrices: list[Tensor], lr: float = 1e-3, momentum: float = 0.95, weight_decay: float = 0.1
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Take a step along the gradients."""
        for group in self.param_groups:
            for matrix in group["params"]:
                state = self.state[matrix]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(matrix)
                buffer = state["momentum_buffer"]
                buffer.lerp_(matrix.grad, 1 - group["momentum"])
                ahead = matrix.grad.lerp(buffer, group["momentum"])  # Nesterov
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                rate = group["lr"] * 0.2 * max(matrix.shape) ** 0.5
                matrix.add_(orthogonal(ahead), alpha=-rate)


def orthogonal(matrix: Tensor) -> Tensor:
    """Bring a matrix's singular values near one, by five steps of a Newton-Schulz iteration in bfloat16."""
    flat = matrix.bfloat16()
    is_tall = flat.shape[0] > flat.shape[1]
    if is_tall:
        flat = flat.T
    flat = flat / flat.norm().clamp(min=1e-7)
    for _ in range(5):
        square = flat @ flat.T
        flat = 3.4445 * flat + (-4.7750 * square + 2.0315 * square @ square) @ flat
    found: Tensor = flat.T if is_tall else flat
    return found.to(matrix.dtype)
