"""What calls of attention kernels hold for a moment. It mirrors `models/kernels.py`.

Fused kernels hold nothing beside their results, but for values narrower than keys, which are padded
for the call. Soft-capped scores are made by matrix products, a block of queries at a time.
"""

from dataclasses import dataclass

from plait.cost.shapes import Shapes
from plait.spec.calls import Call
from plait.spec.model import Model

#: As in `models/kernels.py`: scores held at once, in elements; queries that a block has at least.
_SCORES, _FEW_QUERIES = 2**22, 16


@dataclass(frozen=True)
class Kernels:
    """Calls of a rank, bytes.

    Attributes:
        c, a: of a compute element, of an accurate one.
        batch, heads: samples of a call, its query heads.
        q, k, v, out: widths of what a position has of queries, keys, values, outputs.
        grouped: several query heads share a KV head. capped: scores are.
    """

    c: int
    a: int
    batch: int
    heads: int
    q: int
    k: int
    v: int
    out: int
    grouped: bool
    capped: bool

    @staticmethod
    def of(model: Model, s: Shapes, batch: int, ranks: int, q: int, k: int, v: int) -> "Kernels":
        """ranks: share the heads whose widths are given."""
        heads, out = s.heads // ranks, q if model.mla is None else v
        shared = (n // ranks for n in (q, k, v, out))
        capped = model.attention_softcap is not None
        return Kernels(s.c, s.a, batch, heads, *shared, q != k, capped)

    def results(self, call: Call) -> int:
        """The output and its log-sum-exps."""
        rows, _ = self._sizes(call)
        return rows * (self.c * self.out + self.a * self.heads)

    def gradients(self, call: Call) -> int:
        """Of queries, keys and values."""
        rows, keys = self._sizes(call)
        return self.c * (rows * self.q + keys * (self.k + self.v))

    def forward(self, call: Call) -> int:
        """What is held beside the results."""
        rows, keys = self._sizes(call)
        if not self.capped:  # values and outputs as wide as keys
            return self.c * (rows + keys) * self.q if self.out < self.q else 0
        scores, block, rest = self._block(call)
        wide = self.a * (block * self.q + keys * (self.k + self.v)) if self.c < self.a else 0
        return (2 + self.grouped) * scores + rest + wide

    def backward(self, call: Call) -> int:
        """What is held beside the gradients."""
        rows, keys = self._sizes(call)
        if not self.capped:
            return 2 * self.forward(call)
        scores, block, rest = self._block(call)
        inner = self.a * rows * self.heads + self._mask(call)
        most = max((3 + self.grouped) * scores + rest, 3 * scores + inner + self.a * keys * self.k)
        if self.c < self.a:
            both = rows * self.q + keys * (self.k + self.v)
            most += self.a * (2 * block * self.q + keys * (2 * self.k + self.v))
            most += (self.a - self.c) * both
        return most

    def turned(self, call: Call) -> int:
        """What a triangle read backwards has of its own: queries, keys, values."""
        if call.kind != "anti":
            return 0
        rows, keys = self._sizes(call)
        return self.c * (rows * self.q + keys * (self.k + self.v))

    def _sizes(self, call: Call) -> tuple[int, int]:
        """Queries and keys, of all samples."""
        return self.batch * (call.q1 - call.q0), self.batch * (call.k1 - call.k0)

    def _block(self, call: Call) -> tuple[int, int, int]:
        """Of the block with the most scores: the scores; its queries, of all samples; and what is
        there beside scores and their copies."""
        rows, keys = call.q1 - call.q0, call.k1 - call.k0
        step = min(rows, max(_FEW_QUERIES, _SCORES // max(1, self.batch * self.heads * keys)))
        full = rows // step * step
        sizes = [(step, full), (rows - full, rows)]
        if call.kind == "full":
            sizes = [(queries, keys) for queries, _ in sizes]
        queries, seen = max(sizes, key=lambda size: size[0] * size[1])
        scores = self.a * self.batch * self.heads * queries * seen
        block = self.batch * queries
        rest = self.a * block * (self.q + self.heads) + self._mask(call)
        rest += self.a * self.batch * keys * self.k if self.batch > 1 else 0
        return scores, block, rest

    def _mask(self, call: Call) -> int:
        """Which later keys a block of queries does not see, bool."""
        if call.kind == "full":
            return 0
        rows = call.q1 - call.q0
        step = max(_FEW_QUERIES, _SCORES // max(1, self.batch * self.heads * rows))
        return min(step, rows) * rows
