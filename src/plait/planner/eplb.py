"""Which rank has which expert, and which experts have copies, so that all ranks have equal work.

The expert parallel load balancer of DeepSeek (github.com/deepseek-ai/EPLB; DeepSeek-V3, 2412.19437,
section 3.4). Every expert has a copy, and those that tokens choose most have more. Two policies:

    hierarchical   where the groups of experts divide over the nodes: groups are packed onto nodes,
                   so that tokens which only choose from some groups go to few nodes; copies are
                   made within a node, and packed onto its ranks
    global         otherwise: the same with one group and one node

Packing is greedy: the heaviest first, each to the lightest place that has room.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from plait.spec.findings import Finding, UserError, error
from plait.spec.layout import divisors, nearest

Loads = Sequence[Sequence[float]]

#: Of a load: sums of them are exact enough, and no infinity.
_LARGEST = 1e30


@dataclass(frozen=True)
class Placement:
    """Which expert is in which slot.

    Attributes:
        experts: of each layer, the expert in each slot; slots of a rank follow on each other, the
            ranks of a node too.
        ranks: how many there are, each with equally many slots.
    """

    experts: tuple[tuple[int, ...], ...]
    ranks: int

    def slots(self, layer: int, expert: int) -> tuple[int, ...]:
        """The slots with a copy of an expert, ascending."""
        return tuple(slot for slot, e in enumerate(self.experts[layer]) if e == expert)

    def loads(self, loads: Loads) -> list[list[float]]:
        """What each rank gets to do, by layer: copies share an expert's load equally."""
        result = []
        for row, experts in zip(loads, self.experts, strict=True):
            shares = [row[e] / experts.count(e) for e in experts]
            each = len(experts) // self.ranks
            result.append([sum(shares[i : i + each]) for i in range(0, len(shares), each)])
        return result


def place_experts(
    loads: Loads, replicas: int, ranks: int, nodes: int = 1, groups: int = 1
) -> Placement:
    """A placement for loads that were measured or are expected.

    Args:
        loads: of each layer, the load of each of its experts, in any unit.
        replicas: copies of experts in each layer, the first one of every expert included.
        ranks: over which they are spread, equally many on each. nodes: that the ranks make up.
        groups: in which the experts stand, in their order, all of one size.

    Raises:
        UserError: numbers that do not divide, or loads that are none: all of it at once.
    """
    findings = list(_check(loads, replicas, ranks, nodes, groups))
    if findings:
        raise UserError(findings)
    if groups % nodes:
        groups = nodes = 1
    return Placement(tuple(_place(row, replicas, ranks, nodes, groups) for row in loads), ranks)


def _check(loads: Loads, replicas: int, ranks: int, nodes: int, groups: int) -> Iterator[Finding]:
    rule = "expert-placement"
    counts = {"replicas": replicas, "ranks": ranks, "nodes": nodes, "groups": groups}
    wrong = [name for name, n in counts.items() if not isinstance(n, int) or n < 1]
    for name in wrong:
        message = f"{name} {counts[name]!r} is no whole number from 1 on"
        yield error(name, counts[name], message, 1, rule)
    experts = len(loads[0]) if loads else 0
    if experts < 1:
        yield error("loads", None, "loads have no layer, or no experts in it", rule=rule)
        return
    for layer, row in enumerate(loads):
        if len(row) != experts:
            message = f"layer {layer} has loads of {len(row)} experts, the first of {experts}"
            yield error("loads", len(row), message, experts, rule)
        if not all(isinstance(n, int | float) and 0 <= n <= _LARGEST for n in row):
            message = f"layer {layer}: a load is a number from 0 to {_LARGEST:g}"
            yield error("loads", None, message, rule=rule)
    if wrong:
        return
    if replicas < experts or replicas % ranks:
        legal = -(-max(replicas, experts) // ranks) * ranks
        message = f"{replicas} replicas are fewer than the {experts} experts"
        if replicas >= experts:
            message = f"{replicas} replicas do not divide over {ranks} ranks"
        yield error("replicas", replicas, message, legal, rule)
    if ranks % nodes:
        message = f"{ranks} ranks do not make {nodes} equal nodes"
        yield error("nodes", nodes, message, nearest(nodes, divisors(ranks)), rule)
    if experts % groups:
        message = f"{experts} experts do not make {groups} equal groups"
        yield error("groups", groups, message, nearest(groups, divisors(experts)), rule)


def _place(
    loads: Sequence[float], replicas: int, ranks: int, nodes: int, groups: int
) -> tuple[int, ...]:
    """One layer: the expert of each slot."""
    size = len(loads) // groups
    members = [range(g * size, (g + 1) * size) for g in range(groups)]
    slots: list[int] = []
    for node in _packed([sum(loads[e] for e in group) for group in members], nodes):
        experts = [e for group in node for e in members[group]]
        copies = _copies([loads[e] for e in experts], replicas // nodes)
        shares = [loads[experts[i]] / copies.count(i) for i in copies]
        for rank in _packed(shares, ranks // nodes):
            slots += [experts[copies[i]] for i in rank]
    return tuple(slots)


def _packed(loads: Sequence[float], packs: int) -> list[list[int]]:
    """Numbers of the loads in so many packs, equally many in each."""
    room = len(loads) // packs
    found: list[list[int]] = [[] for _ in range(packs)]
    total = [0.0] * packs
    order = range(len(loads))
    if room > 1:  # with one in each there is nothing to balance, and they stay where they are
        order = sorted(order, key=lambda i: -loads[i])
    for i in order:
        open_ = [p for p in range(packs) if len(found[p]) < room]
        best = min(open_, key=total.__getitem__) if room > 1 else open_[0]
        found[best].append(i)
        total[best] += loads[i]
    return found


def _copies(loads: Sequence[float], replicas: int) -> list[int]:
    """The expert of each copy: one of each, then one more of that which has most per copy."""
    copies, number = list(range(len(loads))), [1] * len(loads)
    for _ in range(replicas - len(loads)):
        most = max(range(len(loads)), key=lambda e: loads[e] / number[e])
        copies.append(most)
        number[most] += 1
    return copies
