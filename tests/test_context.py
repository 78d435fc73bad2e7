"""Context parallelism: attention over ranks against one masked softmax, and what it sends."""

import weakref
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from plait.models import kernels
from plait.models.attention import attention
from plait.parallel.check import make_check
from plait.parallel.collectives import Axis, Scope
from plait.parallel.context import context_attention
from plait.parallel.mesh import Mesh
from plait.spec.sequence import (
    BALANCES,
    Split,
    imbalance,
    pairs,
    ring_imbalance,
    ring_steps,
    split,
    work,
)
from plait.trace.recorder import Recorder
from ranks import run_ranks
from test_attention import explicit, mask, masked

# ------------------------------------------------------------------------------------------
# Positions


@settings(max_examples=200)
@given(st.data())
def test_splits_hold_each_position_once_and_are_level(data):
    documents = tuple(data.draw(st.lists(st.integers(1, 25), min_size=1, max_size=6)))
    ring, ulysses = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    balance = data.draw(st.sampled_from(BALANCES))
    window = data.draw(st.none() | st.integers(1, 30))
    cut = split(documents, ring * ulysses, balance, ulysses)
    seq = sum(documents)
    assert sorted(cut.order) == list(range(seq))
    assert [cut.order[place] for place in cut.places] == list(range(seq))
    assert set(cut.sizes) <= {seq // cut.cp, -(-seq // cut.cp)}
    # In order on each rank and on each group: so that each is one triangle with itself.
    for whole in (cut, cut.joined(ulysses)):
        for rank in range(whole.cp):
            assert whole.positions(rank) == sorted(whole.positions(rank))
    seen = mask(seq, documents, window)
    by_rank = [cut.positions(r) for r in range(cut.cp)]
    assert work(cut, window) == [[int(seen[q][:, k].sum()) for k in by_rank] for q in by_rank]


def test_imbalance_of_causal_work():
    """Worked out by hand: the last of c equal pieces sees c - 1/2 of them, the mean c / 2."""
    n = 1000
    for cp in (2, 4, 8):
        contiguous = split((n * cp,), cp, "contiguous")
        last, mean = (cp - 1) * n * n + n * (n + 1) // 2, n * (n * cp + 1) / 2
        assert imbalance(contiguous) == pytest.approx(last / mean)
        assert ring_imbalance(contiguous) == pytest.approx(last / mean)
        for balance in ("head-tail", "documents"):
            level = split((n * cp,), cp, balance)
            assert imbalance(level) == ring_imbalance(level) == 1
    # Four documents on four ranks: head-tail of the whole gives the outer ranks and the inner
    # ones two halves of documents each, the first half of one and the second of another.
    packed = (n, n, n, n)
    assert imbalance(split(packed, 4, "contiguous")) == 1
    assert imbalance(split(packed, 4, "documents")) == 1
    uneven = (2000, 6000, 500, 3500)
    assert imbalance(split(uneven, 4, "documents")) < 1.01
    assert imbalance(split(uneven, 4, "head-tail")) > 1.1
    assert imbalance(split(uneven, 4, "contiguous")) > 1.5


def test_pairs_of_a_long_sample_need_no_counting():
    n = 10**9
    assert pairs(((0, n),), ((0, n),), (n,)) == n * (n + 1) // 2
    assert pairs(((0, n),), ((0, n),), (n,), 10) == 10 * n - 45


def test_a_window_ends_the_ring_early():
    pieces = split((64,), 8, "contiguous")
    assert [ring_steps(pieces, w) for w in (None, 1, 2, 9, 10, 17, 18)] == [8, 1, 2, 2, 3, 3, 4]
    assert ring_steps(split((8,) * 8, 8, "contiguous")) == 1
    assert ring_steps(split((64,), 8)) == 8


# ------------------------------------------------------------------------------------------
# Equality


@dataclass(frozen=True)
class Case:
    """One attention over ring x ulysses ranks; segments: of every sample."""

    segments: tuple[tuple[int, ...], ...]
    ring: int = 1
    ulysses: int = 1
    heads: int = 4
    kv_heads: int = 2
    dim: int = 6
    value_dim: int = 6
    window: int | None = None
    balance: str = "head-tail"
    method: str = "ring"
    softcap: float | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float64
    batch: int = field(init=False)
    seq: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch", len(self.segments))
        object.__setattr__(self, "seq", sum(self.segments[0]))

    @property
    def world(self) -> int:
        return self.ring * self.ulysses

    def splits(self) -> list[Split]:
        each = [split(s, self.world, self.balance, self.ulysses) for s in self.segments]
        return each[:1] if len(set(each)) == 1 else each

    def positions(self, rank: int) -> Tensor:
        """int64 [B, S_local]."""
        each = self.splits()
        each = each * self.batch if len(each) == 1 else each
        return torch.tensor([s.positions(rank) for s in each], dtype=torch.int64)

    def tensors(self) -> tuple[Tensor, ...]:
        """q, k, v, sinks, and the gradient of the output: of the whole sample."""
        torch.manual_seed(self.seq)
        shapes = [(self.heads, self.dim), (self.kv_heads, self.dim)]
        shapes += [(self.kv_heads, self.value_dim)]
        q, k, v = (torch.randn(self.batch, self.seq, *s, dtype=torch.float64) for s in shapes)
        sinks = torch.randn(self.heads, dtype=torch.float64)
        grad = torch.randn(*q.shape[:-1], self.value_dim, dtype=torch.float64)
        return tuple(t.to(self.dtype) for t in (q, k, v, sinks, grad))


def local(x: Tensor, positions: Tensor) -> Tensor:
    index = positions.view(*positions.shape, *[1] * (x.ndim - 2)).expand(-1, -1, *x.shape[2:])
    return x.gather(1, index)


def axes(rank: int, case: Case, scope: Scope) -> tuple[Axis, Axis]:
    at, inner = divmod(rank, case.ulysses)
    rings = [list(range(i, case.world, case.ulysses)) for i in range(case.ulysses)]
    rows = [[i * case.ulysses + j for j in range(case.ulysses)] for i in range(case.ring)]
    groups = [[dist.new_group(ranks) for ranks in kind] for kind in (rings, rows)]
    return (
        Axis("cp", case.ring, at, groups[0][inner], scope),
        Axis("ulysses", case.ulysses, inner, groups[1][at], scope),
    )


def on_rank(rank: int, cases: list[Case]) -> list[tuple[list[Tensor], dict]]:
    """Local y, dq, dk, dv, dsinks of each case, and what was sent."""
    scope = Scope(check=make_check(dist.distributed_c10d._get_default_store(), rank))
    return [one(rank, case, scope) for case in cases]


def one(rank: int, case: Case, scope: Scope) -> tuple[list[Tensor], dict]:
    ring, ulysses = axes(rank, case, scope)
    mesh = Mesh(None, rank, {"pp": 0}, {"cp": ring, "ulysses": ulysses}, scope)
    q, k, v, sinks, grad = case.tensors()
    where = case.positions(rank)
    leaves = [local(t, where).requires_grad_() for t in (q, k, v)]
    if case.sinks:
        leaves.append(sinks.requires_grad_())
    with Recorder(mesh) as recorder:
        y = context_attention(
            *leaves[:3], ring, ulysses, case.splits(), case.window,
            softcap=case.softcap, sinks=leaves[3] if case.sinks else None, method=case.method,
        )  # fmt: skip
        with mesh.scope.during("backward"):
            grads = torch.autograd.grad(y, leaves, local(grad, where))
    rows = recorder.ledger.rows()
    sent = {(r.axis, r.collective, r.phase): (r.count, r.bytes) for r in rows}
    return [y.detach(), *grads], sent


def reference(case: Case) -> list[Tensor]:
    q, k, v, sinks, grad = case.tensors()
    leaves = [t.requires_grad_() for t in (q, k, v)]
    if case.sinks or case.softcap:
        assert len(case.segments[0]) == 1
        extra = sinks.requires_grad_() if case.sinks else None
        y = explicit(*leaves, case.window, case.softcap, extra)
        leaves += [extra] if case.sinks else []
    else:
        y = masked(*leaves, list(case.segments), case.window)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


def check_cases(cases: list[Case]) -> list[list[dict]]:
    """Holds cases of equal world against one device; what each rank sent, for each case."""
    results = run_ranks(cases[0].world, on_rank, cases, timeout=30)
    sent = []
    for i, case in enumerate(cases):
        wanted = reference(case)
        of_ranks = [result[i] for result in results]
        sent.append([s for _, s in of_ranks])
        for rank, (tensors, _) in enumerate(of_ranks):
            where = case.positions(rank)
            for name, mine, whole in zip(("y", "dq", "dk", "dv"), tensors, wanted, strict=False):
                error = (mine - local(whole, where)).abs().max() if mine.numel() else 0
                assert error <= 1e-12, (case, rank, name, error)
        if case.sinks:  # each rank has the share of its queries (and heads)
            total = sum(tensors[4] for tensors, _ in of_ranks)
            torch.testing.assert_close(total, wanted[4], rtol=0, atol=1e-12)
    return sent


@st.composite
def random_cases(draw: st.DrawFn, world: int) -> Case:
    ulysses = draw(st.sampled_from([u for u in (1, 2, 3, 4, 8) if world % u == 0]))
    heads, kv_heads = draw(
        st.sampled_from(
            [
                (h, kv)
                for h in (1, 2, 3, 4, 6, 8, 16)
                for kv in (1, 2, 3, 4, 8)
                if h % kv == 0 and h % ulysses == 0 and (kv % ulysses == 0 or ulysses % kv == 0)
            ]
        )
    )
    seq, batch = draw(st.integers(1, 75)), draw(st.integers(1, 3))

    def packing() -> tuple[int, ...]:
        cuts = draw(st.sets(st.integers(1, seq - 1), max_size=4)) if seq > 1 else set()
        ends = [0, *sorted(cuts), seq]
        return tuple(ends[i + 1] - ends[i] for i in range(len(ends) - 1))

    return Case(
        segments=tuple(packing() for _ in range(batch)),
        ring=world // ulysses,
        ulysses=ulysses,
        heads=heads,
        kv_heads=kv_heads,
        value_dim=draw(st.sampled_from([6, 6, 4])),
        window=draw(st.none() | st.integers(1, seq + 2)),
        balance=draw(st.sampled_from(BALANCES)),
        method=draw(st.sampled_from(["ring", "all-gather"])),
    )


def random_samples(world: int, examples: int) -> None:
    # A failing list of eight says enough; making it smaller takes many runs.
    @settings(max_examples=examples, phases=[Phase.generate])
    @given(st.lists(random_cases(world), min_size=8, max_size=8))
    def run(cases: list[Case]) -> None:
        check_cases(cases)

    run()


@pytest.mark.parametrize(("world", "examples"), [(2, 2), (3, 3), (4, 2), (8, 1)])
def test_random_samples_over_ranks_equal_one_device(world, examples):
    """Any length (shorter than the ranks too), packing, grouping, window, way of cutting."""
    random_samples(world, examples)


@pytest.mark.sweep
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_many_random_samples_over_ranks_equal_one_device(world):
    random_samples(world, 100)


@pytest.mark.parametrize("method", ["ring", "all-gather"])
def test_soft_caps_and_sinks_over_ranks(method):
    def case(**more) -> Case:
        return Case(((37,), (37,)), ring=2, ulysses=2, method=method, **more)

    check_cases([case(sinks=True), case(softcap=1.5), case(softcap=1.5, sinks=True, window=9)])


def test_half_precision_over_ranks_is_as_near_as_on_one():
    """No further from float64 than torch's own kernel of that precision on one device, times 3:
    gradients of keys are rounded once more for every rank that they pass."""
    exact = Case(((50, 46),), ring=4, dim=16, value_dim=16)
    rough = Case(((50, 46),), ring=4, dim=16, value_dim=16, dtype=torch.bfloat16)
    true, torchs = reference(exact), reference(rough)
    for rank, [(tensors, _)] in enumerate(run_ranks(4, on_rank, [rough])):
        for mine, other, whole in zip(tensors, torchs, true, strict=True):
            assert mine.dtype == torch.bfloat16
            wanted = local(whole, exact.positions(rank))
            assert (mine - wanted).abs().max() <= 3 * (other - whole).abs().max()


# ------------------------------------------------------------------------------------------
# What is sent


def test_messages_and_bytes_of_each_method():
    """float64, 2 samples of 48 positions, 8 query and 4 KV heads of 6: per rank and layer."""
    shape = {"segments": ((48,), (48,)), "heads": 8, "kv_heads": 4}
    batch, kv = 2, 4 * (6 + 6) * 8  # bytes of a position's keys and values
    ring, gathered, heads, mixed = check_cases(
        [
            Case(ring=4, **shape),
            Case(ring=4, method="all-gather", **shape),
            Case(ulysses=4, **shape),
            Case(ring=2, ulysses=2, **shape),
        ]
    )
    block = batch * 48 // 4 * kv
    for sent in ring:
        assert sent == {
            ("cp", "send", "forward"): (3, 3 * block),
            ("cp", "send", "backward"): (6, 6 * block),
        }
    for sent in gathered:
        assert sent == {
            ("cp", "all-gather", "forward"): (1, 4 * block),
            ("cp", "all-gather", "backward"): (1, 4 * block),
            ("cp", "reduce-scatter", "backward"): (1, 4 * block),
        }
    query = 8 * 6 * 8
    both = 2, batch * 48 // 4 * (2 * query + kv)  # q with k and v one way, the output back
    for sent in heads:
        assert sent == {("ulysses", "all-to-all", p): both for p in ("forward", "backward")}
    # The ring goes over groups of two, each rank with half of the heads of twice the positions.
    for sent in mixed:
        assert sent == {
            ("ulysses", "all-to-all", "forward"): both,
            ("ulysses", "all-to-all", "backward"): both,
            ("cp", "send", "forward"): (1, block),
            ("cp", "send", "backward"): (2, 2 * block),
        }


def test_ulysses_sends_as_much_whatever_the_degree_and_a_ring_does_not():
    """Sequence and ranks grow together: 12 positions a rank."""

    def sent(name: str) -> list[int]:
        totals = []
        for cp in (2, 4):
            case = Case(((12 * cp,),), **{name: cp}, heads=8, kv_heads=4)
            [of_ranks] = check_cases([case])
            totals.append(sum(bytes for _, bytes in of_ranks[0].values()))
        return totals

    two, four = sent("ulysses")
    assert two == four
    two, four = sent("ring")
    assert four == 3 * two


def test_few_kv_heads_are_sent_once_for_every_rank_that_needs_one():
    [of_ranks] = check_cases([Case(((48,),), ulysses=4, heads=8, kv_heads=1)])
    position = 8 * 6 * 8 + 4 * (6 + 6) * 8 + 8 * 6 * 8  # queries, four copies, output
    assert of_ranks[0]["ulysses", "all-to-all", "forward"] == (2, 12 * position)


def test_a_window_shortens_the_ring_and_documents_end_it():
    shape = {"ring": 4, "balance": "contiguous"}
    windowed, documents = check_cases(
        [Case(((48,),), window=13, **shape), Case(((12, 12, 12, 12),), **shape)]
    )
    block = 12 * 2 * (6 + 6) * 8
    for sent in windowed:
        assert sent == {
            ("cp", "send", "forward"): (1, block),
            ("cp", "send", "backward"): (2, 2 * block),
        }
    assert documents == [{}] * 4


# ------------------------------------------------------------------------------------------
# What is held


class Held(TorchDispatchMode):
    """Bytes of all storages made within it, the most at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.namespace == "aten":
            for value in tree_iter(result):
                if isinstance(value, Tensor):
                    self._see(value.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self.known.remove(key)
        self.now -= size


def test_scores_of_matrix_products_are_few(monkeypatch):
    """Of a block of queries its scores, their slope and the gradient, and nothing of the block
    before: 16 queries, 8 heads, 512 keys in float64. The rest: 11 tensors like q, one of rows."""
    monkeypatch.setattr(kernels, "_SCORES", 1)
    block, like_q = 16 * 8 * 512 * 8, 512 * 8 * 4 * 8
    with Held() as tracker:
        leaves = [torch.randn(1, 512, 8, 4, dtype=torch.float64).requires_grad_() for _ in "qkv"]
        y = attention(*leaves, softcap=20.0)
        torch.autograd.grad(y, leaves, torch.ones_like(y))
    assert tracker.most <= 3 * block + 12 * like_q


def held(_: int, ranks: int, positions: int, way: str) -> int:
    """The most bytes of a forward and backward with `positions` on each rank: of the busiest.

    Over a group that sends nothing, so that no thread of gloo's holds a message a little longer.
    """
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    most = 0
    for rank in {0, ranks // 2, ranks - 1}:
        axis, alone = Axis("cp", ranks, rank, dist.group.WORLD), Axis("cp")
        ring, ulysses = (alone, axis) if way == "ulysses" else (axis, alone)
        cut = split((positions * ranks,), ranks, ulysses=ulysses.size)
        method = "ring" if way == "ulysses" else way
        with Held() as tracker:
            leaves = [torch.randn(1, positions, 16, 16, requires_grad=True) for _ in range(3)]
            y = context_attention(*leaves, ring, ulysses, [cut], method=method)
            torch.autograd.grad(y, leaves, torch.ones_like(y))
        most = max(most, tracker.most)
    return most


def test_memory_follows_the_positions_of_a_rank_not_those_of_the_sample():
    def most(ranks: int, positions: int, way: str) -> int:
        return run_ranks(1, held, ranks, positions, way)[0]

    for way in ("ring", "ulysses"):
        few = most(4, 64, way)
        assert [most(ranks, 64, way) for ranks in (8, 16)] == [few, few]
        assert most(4, 128, way) == 2 * few
    block = 64 * 16 * (16 + 16) * 4  # and its gradients, of every further rank
    assert most(16, 64, "all-gather") - most(4, 64, "all-gather") == 12 * 2 * block
