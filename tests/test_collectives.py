"""Collectives: what is refused before it is sent, and the autograd pairs against one process."""

import pytest
import torch
import torch.distributed as dist

from plait.parallel import collectives as C
from plait.parallel.check import CollectiveMismatch, make_check
from plait.parallel.collectives import Axis, Scope
from ranks import RankFailed, run_ranks


def world_axis(rank: int, check: bool = False) -> Axis:
    scope = Scope()
    if check:
        scope.check = make_check(dist.distributed_c10d._get_default_store(), rank)
    return Axis("tp", dist.get_world_size(), rank, dist.group.WORLD, scope)


def send_view(rank: int) -> None:
    world_axis(rank).all_reduce(torch.ones(4, 6)[:, :2])


def test_a_view_that_is_not_dense_is_refused():
    with pytest.raises(RankFailed, match="is not dense"):
        run_ranks(2, send_view)


def mismatched(rank: int, kind: str) -> str:
    axis = world_axis(rank, check=True)
    axis.all_reduce(torch.ones(3))
    try:
        if kind == "size":
            axis.all_reduce(torch.ones(4 + rank))
        elif kind == "dtype":
            axis.all_reduce(torch.ones(4, dtype=torch.float64 if rank else torch.float32))
        elif rank == 0:
            axis.all_reduce(torch.ones(4))
        else:
            axis.gather_rows(torch.ones(4))
    except CollectiveMismatch as e:
        return str(e)
    return ""


@pytest.mark.parametrize("kind", ["size", "dtype", "collective"])
def test_ranks_that_differ_say_so_all(kind):
    said = run_ranks(3, mismatched, kind)
    assert all("axis tp differ" in line and "rank 0" in line and "rank 2" in line for line in said)


def pair(rank: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward and gradient of a pair on one rank; x and the gradient depend on the rank."""
    axis = world_axis(rank)
    function = getattr(C, name)
    x = whole_input(rank).requires_grad_()
    y = function(x * 1.0, axis)
    y.backward(gradient(rank, y.shape))
    return y.detach(), x.grad


def whole_input(rank: int) -> torch.Tensor:
    return torch.arange(24, dtype=torch.float64).view(4, 6) * (rank + 1)


def gradient(rank: int, shape: torch.Size) -> torch.Tensor:
    return torch.arange(shape.numel(), dtype=torch.float64).view(shape) + 100 * rank


def test_pairs_against_their_definition():
    """Each pair on two ranks against the sums and pieces that it is defined by."""
    x = [whole_input(r) for r in range(2)]
    total = x[0] + x[1]
    for name, forward in {
        "reduce_out": [total, total],
        "sum_both": [total, total],
        "scatter_rows": [total[:2], total[2:]],
        "gather_columns": [torch.cat(x, 1)] * 2,
    }.items():
        results = run_ranks(2, pair, name)
        g = [gradient(r, y.shape) for r, (y, _) in enumerate(results)]
        backward = {
            "reduce_out": g,
            "sum_both": [g[0] + g[1]] * 2,
            "scatter_rows": [torch.cat(g)] * 2,
            "gather_columns": [g[0][:, :6], g[1][:, 6:]] if name == "gather_columns" else None,
        }[name]
        for rank, (y, dx) in enumerate(results):
            assert torch.equal(y, forward[rank]), f"{name} forward on rank {rank}"
            assert torch.equal(dx, backward[rank]), f"{name} backward on rank {rank}"


def test_an_axis_of_one_sends_nothing():
    """No process group exists here: any collective would raise."""
    axis = Axis("tp")
    x = torch.arange(6.0).view(2, 3)
    assert axis.all_reduce(x).wait() is None
    assert torch.equal(axis.gather_rows(x)[0], x)
    assert torch.equal(axis.scatter_rows(x)[0], x)
    for name in ("reduce_out", "sum_both", "scatter_rows", "gather_columns"):
        assert getattr(C, name)(x, axis) is x
