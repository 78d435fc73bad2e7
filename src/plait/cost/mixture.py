"""A mixture of experts on one rank, tensor by tensor. It mirrors `models/moe.py`,
`models/permute.py` and `parallel/expert.py`.

With n tokens that a rank routes, C rows of choices, h that come to it, a that its experts compute
(`cost/expert.py`), H hidden and f the width of an expert on a rank, it keeps for backward, in the
compute dtype,

    tokens    n H, as router and shared experts keep them     results   C H
    experts   a (H + 3 f): sorted rows, gate, up, product     routing   some n E and n k, accurate

and where weight gradients are put off from I to W a (2 H + 3 f), and n H of the router, accurate.
Rows are never padded; on their way they are there twice, once as they go and once as they come.
"""

from plait.cost.expert import first_rows, own_tokens, tallied
from plait.cost.maps import Maps


class Mixture:
    """The mixtures of a chunk, told to its tape."""

    def __init__(self, chunk: Maps):
        self.chunk, self.s = chunk, chunk.s
        model, layout, s = chunk.model, chunk.layout, chunk.s
        moe, rows = model.moe, first_rows(chunk.job)
        n, c, a = own_tokens(chunk.job), s.c, s.a
        self.moe, self.coarse = moe, c < a
        #: Ranks of tp have the same stream, and each routes some rows of it.
        self.parts = layout.tp > 1 and not layout.sequence_parallel
        self.token = c * n * s.hidden
        self.chosen, self.come, self.all = (c * r * s.hidden for r in rows)
        self.inner = c * rows.all * (moe.ffn // layout.etp)
        self.ep, self.etp = layout.ep > 1, layout.etp
        self.wide = a * n * s.hidden if self.coarse else 0
        self.matrix = a * moe.experts * s.hidden if self.coarse else 0
        self.scores, choices = a * n * moe.experts, n * moe.topk
        #: What the router keeps, and what tells rows where they go.
        self.routing = self._routing(n, choices)
        self.choices = (8 + a) * choices  # experts and weights
        self.way = 8 * (2 * choices + rows.chosen)
        self.way += choices if rows.chosen < choices else 0  # which go to none
        self.weights = a * choices
        #: How many rows go where, which ranks tell each other.
        self.counted = 8 * (moe.experts * (2 if layout.ep > 1 else 1) + 1)
        self.gathered = 8 * moe.experts * layout.etp if layout.etp > 1 else 0
        #: Rows of one rank have been sorted by it.
        self.sorts = layout.ep * layout.etp > 1
        self.order = 8 * rows.all if self.sorts else 0
        self.width = (moe.shared_ffn or moe.shared * moe.ffn) // layout.tp

    def _routing(self, n: int, choices: int) -> int:
        moe, a, layout = self.moe, self.s.a, self.chunk.layout
        aux, z = moe.aux_loss > 0, moe.z_loss > 0
        scores = (not moe.topk_first or aux) + aux + z
        divided = moe.normalize and not (moe.topk_first and moe.score == "softmax")
        sums = divided + (aux and moe.score == "sigmoid") + z  # a number a token
        weights, chosen = 1 + divided, 8
        if moe.capacity is not None:  # which of all ranks' tokens are within it
            chosen += 8 + layout.tp * layout.cp
        kept = scores * self.scores + sums * a * n + choices * (weights * a + chosen)
        return kept + tallied(self.chunk.job, 1)

    @property
    def later(self) -> bool:
        return self.chunk.queue is not None

    @property
    def gated(self) -> bool:
        return self.chunk.model.gated

    @property
    def keeps_input(self) -> bool:
        """Whether somebody keeps the mixture's input as it was given."""
        return self.moe.shared > 0 or not (self.parts or self.copied)

    @property
    def copied(self) -> bool:
        """Whether the router keeps an accurate copy of its input."""
        return self.chunk.split and self.coarse

    @property
    def gathers(self) -> bool:
        """Whether its output is what has been gathered, and is not kept."""
        chunk = self.chunk
        return self.parts and not (self.moe.shared or chunk.after or chunk.model.dropout)

    @property
    def shared(self) -> int:
        """Bytes of an inner tensor of the shared experts."""
        return self.s.c * self.s.tokens * self.width

    # -- forward

    def forward(self, keep: bool, stop: bool, again: bool) -> None:
        """Leaves the output, and with `keep` what backward needs. `stop`: makes only that. again:
        somebody holds the input until backward has ended."""
        tape, chunk = self.chunk.tape, self.chunk
        own, stream, shared = self.token if self.parts else 0, chunk.stream, self.moe.shared > 0
        tape.take(own)
        with tape.during(0 if self.copied and keep else self.wide):
            tape.take(self.wide if self.copied and keep else 0)
            tape.spike(self.matrix)
        tape.take(self.routing)
        tape.spike(3 * self.scores)
        tape.drop(0 if keep else self.routing - self.choices)
        with tape.during(self.counted), tape.during(self.gathered, "buffers"):
            tape.take(self.way)
            self._there()
            self._experts(keep)
            self._back()
            tape.take(self.token)
        if not keep:
            tape.drop(self.chosen + self.choices + self.way + self.order)
        if self.parts and (shared or not stop):
            tape.take(stream, "buffers")
            tape.drop(self.token)
            if not (self.gathers or shared):
                tape.move(stream, "buffers", "activations")
        kind = "buffers" if self.parts and shared else ""
        if shared:
            self._shared(keep, stop)
            tape.take(0 if stop else stream)
            tape.drop(0 if stop else stream)
            tape.drop(0 if stop else stream, kind)
        if stop:
            tape.drop(stream if shared else self.token, kind)
        if not keep or self.copied:
            tape.drop(own)
        if keep and not (self.keeps_input or again):
            tape.drop(stream)

    def _moved(self, before: int, after: int, there: bool, kind: str = "") -> None:
        """Rows take the place of others."""
        if there:
            self.chunk.tape.take(after, kind)
            self.chunk.tape.drop(before, kind)

    def _there(self) -> None:
        """Leaves the experts' rows, sorted, and their order."""
        tape = self.chunk.tape
        tape.take(self.chosen)
        self._moved(self.chosen, self.come, self.ep)
        self._spread()
        tape.take(self.order)
        tape.spike(2 * self.order)
        self._moved(self.all, self.all, self.sorts)

    def _back(self) -> None:
        """Leaves the rows of this rank's choices in place of the experts' rows."""
        self._moved(self.all, self.all, self.sorts)
        self._add_up()
        self._moved(self.come, self.chosen, self.ep)

    def _spread(self) -> None:
        """Rows of this rank to those of all ranks of etp."""
        if self.etp > 1:
            with self.chunk.tape.during(self.etp * self.come):
                self.chunk.tape.take(self.all)
            self.chunk.tape.drop(self.come)

    def _add_up(self) -> None:
        """Parts of rows of all ranks of etp to the sum of this rank's own."""
        if self.etp > 1:
            with self.chunk.tape.during(self.etp * self.come):
                self.chunk.tape.take(self.come)
            self.chunk.tape.drop(self.all)

    def _experts(self, keep: bool) -> None:
        """Leaves what they make, beside what they keep."""
        tape, maps = self.chunk.tape, 2 if self.gated else 1
        tape.take(maps * self.inner)
        self._product()
        tape.drop(0 if keep else (maps - 1) * self.inner)  # the gate has no name of its own
        tape.take(self.all)
        tape.drop(0 if keep else self.all + 2 * self.inner)

    def _product(self) -> None:
        tape = self.chunk.tape
        if self.chunk.model.mlp == "swiglu-clamped":
            tape.spike(4 * self.inner)
        tape.take(self.inner)

    def _shared(self, keep: bool, stop: bool) -> None:
        """Leaves what the shared experts make, unless `stop`."""
        chunk, maps = self.chunk, 2 if self.gated else 1
        chunk.fan_out(*[self.width] * maps)
        chunk.tape.take(self.shared)
        chunk.leave_or_stop(chunk.model.mlp_bias, stop)
        if not keep:
            chunk.tape.drop((maps + 1) * self.shared)

    # -- backward

    def backward(self, name: str) -> None:
        """Leaves the input's gradient; the output's is the caller's, unless a norm or dropout made
        it."""
        tape, chunk, moe = self.chunk.tape, self.chunk, self.moe
        stream = chunk.stream
        own = stream if chunk.after or chunk.model.dropout else 0
        if moe.shared:
            self._shared_backward(f"{name}.shared")
            if own and self.later and not chunk.rows:  # which the last map keeps
                own, chunk.shared = 0, False
        if self.parts:
            tape.take(self.token)
            tape.drop(own)
            own = self.token
        with tape.during(self.chosen):
            tape.take(self.chosen)
        tape.take(self.weights)  # the gradient of what choices weigh
        tape.drop(self.chosen)  # what was kept
        tape.drop(own)
        self._moved(self.chosen, self.come, self.ep)
        self._spread()
        self._moved(self.all, self.all, self.sorts)
        self._experts_backward(f"{name}.experts")
        self._moved(self.all, self.all, self.sorts)
        tape.drop(self.order)
        self._add_up()
        self._moved(self.come, self.chosen, self.ep)
        self._moved(self.chosen, self.token, True)
        tape.drop(self.way)
        if moe.shared and not self.parts:
            self._added(stream)
        self._router_backward(f"{name}.router")
        if self.parts:
            tape.take(stream, "buffers")
            tape.drop(self.token)
            tape.take(stream if moe.shared else 0)
            tape.move(stream, "buffers", "activations")
            tape.drop(2 * stream if moe.shared else 0)

    def _added(self, n: int) -> None:
        """Two gradients to their sum."""
        self.chunk.tape.take(n)
        self.chunk.tape.drop(2 * n)

    def _shared_backward(self, name: str) -> None:
        chunk, n = self.chunk, self.shared
        chunk.leave_backward(f"{name}.down", self.width, n, own=0)
        chunk.product_backward(n)
        maps = ("gate", "up") if self.gated else ("up",)
        kept = chunk.stream if self.parts else 0
        others = not (self.parts or self.copied)  # the router keeps the same one
        widths = {f"{name}.{m}": self.width for m in maps}
        chunk.fan_out_backward(widths, kept, others=others)

    def _experts_backward(self, name: str) -> None:
        """Turns the gradient of what experts made into that of their rows."""
        tape, chunk = self.chunk.tape, self.chunk
        inner, rows = self.inner, self.all
        self._map_backward(f"{name}.down", inner, rows, inner)
        if self.chunk.model.mlp == "swiglu-clamped":
            tape.spike(6 * inner)
        chunk.product_backward(inner)
        if self.gated:
            self._map_backward(f"{name}.gate", rows, inner, 0)
        self._map_backward(f"{name}.up", rows, inner, rows, added=self.gated)

    def _map_backward(
        self, name: str, inputs: int, outputs: int, kept: int, added: bool = False
    ) -> None:
        """Turns the gradient of a map's outputs into that of its inputs, of which so many bytes
        have been kept for it. added: to that of another map, before its parameters' arrive."""
        tape, chunk = self.chunk.tape, self.chunk
        names = [n for n in (f"{name}.weight", f"{name}.bias") if n in chunk.numel]
        tape.take(inputs)
        if self.later:
            chunk.put_off(names, (tape.kind, outputs), (tape.kind, kept))
            self._added(inputs if added else 0)
            return
        tape.take(sum(chunk.weight(n) for n in names))
        tape.drop(outputs)
        tape.drop(kept)
        self._added(inputs if added else 0)
        chunk.arrive(*names, weights=True)

    def _router_backward(self, name: str) -> None:
        """Adds to the gradient of the tokens."""
        tape, chunk, moe = self.chunk.tape, self.chunk, self.moe
        tape.drop(self.weights)
        tape.spike(3 * self.scores)
        names = [n for n in (f"{name}.bias", f"{name}.correction") if n in chunk.numel]
        for n in names:
            chunk.arrive(n)
        own = self.token if self.parts else 0  # of the input, what only the router keeps
        if not self.parts and not self.copied:
            own = chunk.stream
        weight = f"{name}.weight"
        tape.take(self.scores)
        tape.spike(self.wide + self.matrix)
        tape.take(self.token)
        if self.later:
            held = self.wide if self.coarse else own
            chunk.put_off([weight], (tape.kind, held), (tape.kind, self.scores))
        else:
            with tape.during(0 if self.copied else self.wide):
                tape.take(chunk.weight(weight))
                tape.spike(self.matrix)
            tape.drop(self.scores + (self.wide if self.copied else own))
        tape.drop(self.routing)
        self._added(self.token)
        if self.copied and not self.parts and moe.shared:
            tape.drop(0 if self.later else chunk.stream)
        if not self.later:
            chunk.arrive(weight, weights=True)
