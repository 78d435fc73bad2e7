"""DualPipe and DualPipeV: micro batches from both ends of the ranks at once.

DeepSeek-V3, arXiv 2412.19437, section 3.2.1, in the order of the authors' program. Every rank has
two chunks, which work as two pipelines: in DualPipe two copies of the model, one in each
direction; in DualPipeV the two legs of one V. A forward of the one stands before a backward of the
other, so that a program can let them overlap.
"""

from collections import Counter, deque

from plait.schedules.table import Action, Table


def dualpipe(pp: int, micro_batches: int) -> Table:
    """Two copies: micro batches below m/2 pass chunk c on rank c, the others on rank pp - 1 - c.

    pp and `micro_batches` are even, `micro_batches` at least 2 pp.
    """
    half = micro_batches // 2
    ranks = []
    for rank in range(pp):
        depth = min(rank, pp - 1 - rank)
        near, far = (0, half) if rank == depth else (half, 0)
        ranks.append(_rank(depth, pp // 2, half, (depth, near), (pp - 1 - depth, far)))
    return Table("dualpipe", tuple(ranks))


def dualpipe_v(pp: int, micro_batches: int) -> Table:
    """One copy, cut in half: rank r has chunks r and 2 pp - 1 - r; at least 2 pp micro batches."""
    return Table(
        "dualpipev",
        tuple(_rank(r, pp, micro_batches, (r, 0), (2 * pp - 1 - r, 0)) for r in range(pp)),
    )


def _rank(
    depth: int, depths: int, micro_batches: int, near: tuple[int, int], far: tuple[int, int]
) -> tuple[Action, ...]:
    """The eight phases of a rank that is `depth` steps from where its near pipeline begins.

    `near` and `far` are the chunk that is met first and the one that is met later, each with the
    number of its first micro batch; both get `micro_batches`.
    """
    actions: list[Action] = []
    done: Counter[tuple[int, str]] = Counter()
    put_off: deque[tuple[int, int]] = deque()

    def forward(leg):
        actions.append(Action("F", leg[0], leg[1] + done[leg[0], "F"]))
        done[leg[0], "F"] += 1

    def backward(leg, split=False):
        at = leg[0], leg[1] + done[leg[0], "B"]
        actions.append(Action("I" if split else "B", *at))
        done[leg[0], "B"] += 1
        if split:
            put_off.append(at)

    def weight():
        if put_off:
            actions.append(Action("W", *put_off.popleft()))

    left = depths - depth - 1
    for _ in range(2 * left):
        forward(near)
    for _ in range(depth + 1):
        forward(near)
        forward(far)
    for _ in range(left):
        backward(far, split=True)
        weight()
        forward(far)
    for _ in range(micro_batches - 2 * depths + depth + 1):
        forward(near)
        backward(far)
        forward(far)
        backward(near)
    for _ in range(left):
        backward(far)
        forward(far)
        backward(near)
    # The second half of these puts its weight gradients off, for the time of waiting behind them.
    for i in range(2 * (depth + 1)):
        backward((far, near)[i % 2], split=i > depth)
    for _ in range(left):
        weight()
        backward(near, split=True)
    while put_off:
        weight()
    return tuple(actions)
