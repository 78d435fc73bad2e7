"""Compares what the ranks are about to send, before they send it.

Gloo aborts the process when sizes differ between ranks, and hangs when one rank issues another
collective. This check turns both into one clear error on every rank. It goes through the store,
not through a collective, so it does not show in the ledger.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from plait.parallel.collectives import Axis


class CollectiveMismatch(RuntimeError):
    """Ranks of one group were about to issue different collectives."""


def make_check(store: dist.Store, rank: int) -> Callable[..., None]:
    """A function for `Scope.check`: raises CollectiveMismatch on every rank of the group.

    Its arguments: the axis, what is issued, a tensor of it, and, where not the whole axis takes
    part, the positions of those that do.
    """
    issued: Counter[tuple[int, ...]] = Counter()

    def check(axis: Axis, name: str, x: Tensor, among: Sequence[int] | None = None) -> None:
        ranks = tuple(dist.get_process_group_ranks(axis.group))
        if among is not None:
            ranks = tuple(ranks[i] for i in among)
        issued[ranks] += 1
        group = f"plait/check/{'-'.join(map(str, ranks))}"
        key = f"{group}/{issued[ranks]}"
        mine = f"{name} of {list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
        store.set(f"{key}/{rank}", mine)
        theirs = store.multi_get([f"{key}/{r}" for r in ranks])
        if issued[ranks] > 1:  # all are here, so all have read what was said before
            store.delete_key(f"{group}/{issued[ranks] - 1}/{rank}")
        if any(t.decode() != mine for t in theirs):
            said = "; ".join(f"rank {r}: {t.decode()}" for r, t in zip(ranks, theirs, strict=True))
            raise CollectiveMismatch(f"the ranks of axis {axis.name} differ: {said}")

    return check
