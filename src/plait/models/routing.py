"""Which experts serve a token, how much each weighs, and who is left out: pure functions."""

import torch
from torch import Tensor

from plait.spec.model import MoE


def choose(moe: MoE, logits: Tensor, correction: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The routing rule.

    Args:
        moe: says which.
        logits: [T, E]. correction: [E], joins the scores for the choice only.

    Returns:
        index int64 [T, k]: the chosen experts.
        weight [T, k]: of their outputs.
        scores [T, E]: of all experts, adding up to 1 for each token (for the balance).
    """
    every = logits.sigmoid() if moe.score == "sigmoid" else logits.softmax(-1)
    ranking = (logits if moe.topk_first else every).detach()
    if correction is not None:
        ranking = ranking + correction.detach().to(ranking.dtype)
    if moe.groups > 1:
        ranking = _within_groups(moe, ranking)
    index = ranking.topk(moe.topk, dim=-1).indices
    if moe.topk_first:
        chosen = logits.gather(1, index)
        weight = chosen.sigmoid() if moe.score == "sigmoid" else chosen.softmax(-1)
    else:
        weight = every.gather(1, index)
    if moe.normalize and not (moe.topk_first and moe.score == "softmax"):
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
    if moe.scaling != 1.0:
        weight = weight * moe.scaling
    if moe.score == "sigmoid":
        every = every / (every.sum(-1, keepdim=True) + 1e-20)  # all can be 0, by rounding
    return index, weight, every


def _within_groups(moe: MoE, ranking: Tensor) -> Tensor:
    """The ranking with -inf outside of each token's best groups."""
    groups = ranking.view(len(ranking), moe.groups, -1)
    if moe.group_score == "max":
        worth = groups.amax(-1)
    else:
        worth = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)
    best = worth.topk(moe.topk_groups, dim=-1).indices
    closed = torch.ones_like(worth, dtype=torch.bool).scatter_(1, best, False)
    return groups.masked_fill(closed[..., None], float("-inf")).flatten(1)


def log_sum_exp(logits: Tensor) -> Tensor:
    """[T, E] -> [T]."""
    return torch.logsumexp(logits, dim=-1)


def within_capacity(
    index: Tensor,
    rows: Tensor,
    sequence: Tensor,
    experts: int,
    most: int,
    weight: Tensor | None = None,
) -> Tensor:
    """Which choices stay where an expert takes at most `most` tokens of a sequence.

    Args:
        index: int64 [T, k], the chosen experts, tokens in any order; whole sequences.
        rows: int64 [T], each token's number in the data: who comes first in a sequence.
        sequence: int64 [T], from 0.
        weight: [T, k]; with it the heaviest stay, of equals the first; without it the first.

    Returns:
        bool [T, k].
    """
    choices = index.numel()
    order = (rows[:, None] + torch.zeros_like(index)).flatten().argsort(stable=True)
    if weight is not None:
        order = order[weight.flatten()[order].argsort(descending=True, stable=True)]
    queue = (sequence[:, None] * experts + index).flatten()
    order = order[queue[order].argsort(stable=True)]  # queue by queue, best first
    sorted_queue = queue[order]
    start = torch.searchsorted(sorted_queue, sorted_queue)  # where the own queue begins
    place = torch.arange(choices, device=index.device) - start
    keep = torch.empty(choices, dtype=torch.bool, device=index.device)
    keep[order] = place < most
    return keep.view(index.shape)
