"""AdamW on this rank's flat weights, and the gradient norm that is one number in every layout."""

import torch
from torch import Tensor

from plait.models.moe import correct
from plait.parallel.flat import Segment
from plait.spec.job import Train


def make_optimizer(segments: list[Segment], train: Train) -> torch.optim.AdamW:
    """torch's fused AdamW (decoupled decay, 1711.05101) over flat stretches of weights.

    Matrices decay, vectors do not. A parameter of the optimizer is a segment, in their order.
    """
    groups = [
        {"params": [s.weight.detach()], "weight_decay": train.weight_decay * s.decay}
        for s in segments
    ]
    return torch.optim.AdamW(
        groups, lr=train.learning_rate, betas=(train.beta1, train.beta2), eps=train.eps, fused=True
    )


def squared_norm(segments: list[Segment]) -> Tensor:
    """This rank's share of the squared gradient norm, float64: summed over all ranks of the
    world it is the whole, for each element is divided by the number of ranks that hold it."""
    total = torch.zeros((), dtype=torch.float64, device=segments[0].grad.device)
    for s in segments:
        if not s.by_load:
            total += _square(s.grad) / s.holders
    return total


def _square(x: Tensor, row: int = 1024) -> Tensor:
    """The sum of squares of a flat tensor, float64.

    Row by row: torch sums millions of float32 squares with three digits right, and a float64 copy
    of the gradients takes thirty times as long as reading them.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    whole = x.numel() // row * row
    norms = (
        torch.linalg.vector_norm(x[:whole].view(-1, row), dim=1, dtype=dtype),
        torch.linalg.vector_norm(x[whole:], dtype=dtype),
    )
    return sum(n.double().square().sum() for n in norms)


def apply_update(
    optimizer: torch.optim.AdamW,
    segments: list[Segment],
    norm: Tensor,
    clip: float,
    loss_scale: float,
    learning_rate: float,
    correction_speed: float = 0.0,
) -> None:
    """One optimizer step with gradients / loss_scale, clipped to norm `clip` (0: not clipped).

    norm: the norm of the scaled gradients. Where it is not finite nothing is changed.
    correction_speed: of what is moved by the load of experts (`MoE.correction_speed`).
    """
    factor = torch.full_like(norm, 1 / loss_scale)
    if clip > 0:
        # The 1e-6 is that of torch.nn.utils.clip_grad_norm_ and of Megatron-LM.
        factor = factor * torch.clamp(clip / (norm / loss_scale + 1e-6), max=1.0)
    optimizer.found_inf = (~norm.isfinite()).float()
    for group, s in zip(optimizer.param_groups, segments, strict=True):
        group["lr"] = learning_rate
        if s.by_load:
            correct(s.weight, s.grad * norm.isfinite(), correction_speed)
            continue
        group["params"][0].grad = s.grad.mul_(factor).to(s.weight.dtype)
    optimizer.step()
    for group in optimizer.param_groups:
        group["params"][0].grad = None
