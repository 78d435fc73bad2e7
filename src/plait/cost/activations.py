"""A chunk of the model in a step, tensor by tensor: what its modules take, keep and drop.

Each method follows the code of the same name in `models/` and `parallel/` and tells a `Tape` the
bytes; the order is that of the program, so the peaks come out where they are. c is a byte of the
compute dtype, a of an accurate one. "Keeps" is what autograd holds until the module's backward;
the rest is dropped where Python drops it. Below, n is a number of elements.
"""

from collections.abc import Callable

from plait.cost.context import Core, needs_calls
from plait.cost.ends import Ends
from plait.cost.latent import Latents
from plait.cost.maps import Maps
from plait.cost.mixture import Mixture
from plait.cost.parts import Part
from plait.cost.tape import Tape
from plait.cost.tensor import has_mlp
from plait.spec.job import Job


class Chunk(Maps):
    """A chunk of the model as `parallel.pipeline` runs it: F, B, I, W of a micro batch.

    A chunk that does not embed is given its input, and one without the head the gradient of its
    output: whoever gave them holds them until the backward has ended.
    """

    def __init__(self, job: Job, part: Part, split: bool):
        super().__init__(job, part, split)
        self.coarse = self.s.c < self.s.a
        self._core = Core(job)
        self.ends = Ends(self)
        self.latents = Latents(self) if job.model.mla else None
        self.mixture = Mixture(self) if job.model.moe else None
        self.before = job.model.norm_at in ("input", "both")  # norms of a branch
        self.given = False  # the gradient of the stream is somebody else's, to the end
        self.owed = 0  # bytes of that gradient, once it has been used
        self.kept = 0  # bytes of the context that forward left

    def record(self, kind: str, accumulated: bool) -> Tape:
        """What an action does, on a tape that begins with nothing.

        F leaves the output beside what it keeps, B and I leave the gradient of the input and drop
        the input. A W must follow an I. accumulated: gradients of a micro batch are there.
        """
        self.on(tape := Tape())
        if kind == "F":
            self.forward()
        elif kind == "W":
            queue, self.queue = self.queue, None
            tape.enter("backward", "activations")
            self.engine.begin_micro_batch(accumulated)
            self.weight_gradients(queue)
            self.engine.finish()
        elif kind == "I":
            self.queue = []
            self.backward()
            self.engine.release_all()
        else:
            self.queue = None
            self.engine.begin_micro_batch(accumulated)
            self.backward()
            self.engine.finish()
        assert not self.engine.gathered, "weights are gathered for an action at a time"
        return tape

    def forward(self) -> None:
        """Leaves the output; of the head what the loss keeps."""
        tape, engine = self.tape, self.engine
        tape.enter("forward", "activations")
        passing = self.context()
        for unit, name in enumerate(self.units):
            if name == "head":
                tape.enter("loss", "logits")
            engine.gather(unit, unit + 1)
            if name == "embed":
                self.ends.embed()
            elif name == "head":
                self.ends.head()
            else:
                self.layer(_number(name), keep=self.layout.recompute != "full")
            engine.release(unit)
        tape.drop(passing, "activations")

    def backward(self) -> None:
        """Turns the output's gradient into the input's, and drops what forward kept."""
        tape, engine, part = self.tape, self.engine, self.part
        self.given, self.owed = not part.head, 0
        tape.enter(*(("loss", "logits") if part.head else ("backward", "activations")))
        for unit, name in reversed(list(enumerate(self.units))):
            if self.queue is not None and unit + 1 < len(self.units):
                engine.release_all(unit + 1)
            engine.gather(unit, unit - 1)
            if name == "head":
                self.ends.head_backward()
                if unit > 0:  # what the unit before asks for when the gradient gets there
                    if self.queue is not None:
                        engine.release_all(unit)
                    engine.gather(unit - 1, unit - 2)
                    self.ends.leave_head()
            elif name == "embed":
                tape.drop(self.kept)
                self.ends.embed_backward()
            else:
                if self.layout.recompute == "full":
                    # What first asks for a tensor is the last map, whose gradient is gathered.
                    first = self.rows and not self.after and not self.model.dropout
                    first = first and has_mlp(self.model, _number(name))
                    with tape.during(self.whole if first else 0, "buffers"):
                        self.layer(_number(name), keep=True, stop=True)
                self.layer_backward(_number(name))
        tape.drop(0 if part.embed else self.kept)  # of the context
        tape.drop(2 * self.s.a if part.head else 0, "logits")  # the loss, and its gradient
        # Where a branch has no norm before it, a map that is put off keeps the chunk's input.
        keeps = self.queue is not None and not self.before and part.layers
        tape.drop(self.owed + (0 if part.embed or keeps else self.stream))

    def input_keeps(self, i: int, branch: str) -> int:
        """Bytes that are let go with a branch's input: none if that is the chunk's."""
        first = branch == "attention" and i == self.part.layers.start
        return 0 if first and not self.part.embed else self.stream

    def sum_gradients(self) -> None:
        """Both ways into a branch's input are summed into a tensor of their own."""
        self.tape.spike(self.stream)
        self.drop_gradient()

    def drop_gradient(self) -> None:
        """The gradient of the stream has been used, and another takes its place. A map that was
        put off may keep it, or whoever gave it."""
        if self.given and not self.shared:
            self.owed = self.stream
        elif not self.shared:
            self.tape.drop(self.stream)
        self.given = self.shared = False

    def context(self) -> int:
        """Leaves positions and token numbers (int64), the rotary tables; returns the bytes
        of those that are let go after forward. Rotations keep their tables, and what is recomputed
        all that it was given."""
        s, tape, model = self.s, self.tape, self.model
        # Under context parallelism positions are there already.
        passing, tables = 8 * (s.tokens + (0 if self.layout.cp > 1 else s.seq)), 0
        tape.take(passing)
        # Cut document by document, samples have positions of their own.
        seq = s.tokens if self.layout.cp > 1 and self.job.data.document_mask else s.seq
        if model.positions == "rope":
            dim = model.mla.rope_dim if model.mla else s.dim
            # Angles, frequencies, sines in float64; or the tables made of what was rounded.
            tape.spike(max(12 * seq + s.c * seq // 2, (4 + 7 * s.c // 2) * seq) * dim + 4 * dim)
            tables = 2 * s.c * seq * dim * (1 if model.rope_local_theta is None else 2)
            tape.take(tables)
        again = self.layout.recompute == "full" or self.again("attention")
        passing -= self.ends.positions
        self.kept = (tables + (passing if again else 0)) if self.part.layers else 0
        return passing + tables - self.kept

    # -- norm: [rows, width] -> the same. Keeps its input, which is its maker's to count

    def norm_keeps(self, rows: int, width: int, sharded: bool) -> int:
        """What a norm keeps beside its input."""
        s, n = self.s, rows * width
        offset = self.model.norm_offset  # then the weights that it has are a tensor of their own
        if sharded:  # the input made accurate, its root mean square, the result before scaling
            weights = s.a * width if self.coarse or offset else 0
            return (s.a * n if self.coarse else 0) + s.a * n + s.a * rows + weights
        if self.model.norm == "rms":
            return s.a * rows + (s.a * width if offset else 0)
        return 2 * s.c * rows + (s.c * width if offset else 0)

    def norm(self, rows: int, width: int, keep: bool, sharded: bool = False) -> None:
        """Leaves the output."""
        s, tape, n = self.s, self.tape, rows * width
        keeps = self.norm_keeps(rows, width, sharded)
        if sharded or (self.model.norm == "rms" and self.coarse):
            # Accurate copies of the input and of the result, beside the result.
            tape.spike(keeps + s.c * n + (1 if sharded else 2) * s.a * n)
        tape.take(s.c * n + (keeps if keep else 0))

    def norm_backward(
        self,
        name: str,
        rows: int,
        width: int,
        kept: int,
        input: str = "",
        sharded: bool = False,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Turns the output's gradient into the input's; drops what the norm kept, and of the input,
        which is of class `input`, so many bytes. `then`: what is done with the input's gradient
        before the parameters' arrive."""
        s, tape, n = self.s, self.tape, rows * width
        if self.model.norm == "rms" or sharded:
            # Coarse: accurate copies of input and gradient, their product, the result; of the
            # weights too. Else the weights' gradient comes while the product is there.
            copies = 4 * s.a + s.c if self.coarse else 2 * s.a
            tape.spike(copies * n + s.a * (rows + width))
        else:
            tape.spike(s.c * (n + 2 * width))
        tape.drop(self.norm_keeps(rows, width, sharded))
        tape.drop(kept, input)
        kind = tape.kind
        then()
        self.arrive(f"{name}.weight", f"{name}.bias", kind=kind)

    # -- attention and MLP: [t, hidden] -> [t, hidden]

    def core(self, i: int) -> Core | None:
        """Attention by our own calls of kernels: over the cp ranks, in a window, with sinks or a
        soft cap."""
        return self._core if needs_calls(self.job, i) else None

    def attention(self, i: int, keep: bool, stop: bool = False) -> None:
        """Leaves the output, and with `keep` what backward needs. `stop`: makes only that."""
        if self.latents:
            self.latents.forward(i, keep, stop)
            return
        s, tape, model, core = self.s, self.tape, self.model, self.core(i)
        q, kv, heads = s.c * s.tokens * s.q, s.c * s.tokens * s.kv, s.tokens * s.heads
        self.fan_out(s.q, s.kv, s.kv)
        if model.qk_norm:
            for n, width in ((s.heads, s.q), (s.kv_heads, s.kv)):
                self.norm(*self.qk_shape(n, width), True, self.sharded)
            tape.drop(s.c * s.tokens * (s.q + s.kv) if self.sharded and self.coarse else 0)
            tape.drop(0 if keep else self.qk_norms_keep())
        if model.positions == "rope":
            tape.take(q + kv)
            tape.spike(kv)  # of the second: the input turned by half a head
            tape.drop(q + kv)
        if core:
            core.forward(tape, i, keep)
        else:
            tape.take(q + s.a * heads)
        self.leave_or_stop(model.o_bias, stop)
        if core:
            tape.drop(core.given)
        if not keep:
            early = core.keeps if core and core.given else 0
            tape.drop(self.attention_keeps(i) - self.qk_norms_keep() - early)

    def attention_keeps(self, i: int) -> int:
        """Queries, keys, values, the output, log-sum-exps; what norms of queries and keys keep."""
        s = self.s
        n = s.c * s.tokens * (2 * s.q + 2 * s.kv) + s.a * s.tokens * s.heads
        if core := self.core(i):
            n = core.keeps + core.output
        return n + self.qk_norms_keep()

    def qk_norms_keep(self) -> int:
        """What norms of queries and keys keep, their inputs included."""
        s, kept = self.s, 0
        for heads, width in ((s.heads, s.q), (s.kv_heads, s.kv)) if self.model.qk_norm else ():
            kept += self.norm_keeps(*self.qk_shape(heads, width), self.sharded)
            kept += 0 if self.sharded and self.coarse else s.c * s.tokens * width
        return kept

    @property
    def sharded(self) -> bool:
        return self.tp and self.model.qk_norm == "full"

    def qk_shape(self, heads: int, width: int) -> tuple[int, int]:
        """Rows and width of a norm over queries or keys."""
        if self.model.qk_norm == "full":
            return self.s.tokens, width
        return self.s.tokens * heads, self.s.dim

    def attention_backward(self, name: str, i: int) -> None:
        """Leaves the input's gradient; the output's is the caller's."""
        input = self.stream if self.before else self.input_keeps(i, "attention")
        if self.latents:
            self.latents.backward(name, i, input)
            return
        s, tape, model, core = self.s, self.tape, self.model, self.core(i)
        q, kv = s.c * s.tokens * s.q, s.c * s.tokens * s.kv
        self.leave_backward(f"{name}.o", s.q, core.output if core else 0)
        if core:
            core.backward(tape, i, self.queue is not None)
            self.arrive(f"{name}.sinks")
        else:
            tape.take(q + 2 * kv)
            tape.drop(q)
            output = q if self.queue is not None else 0  # which the output map keeps
            tape.drop(self.attention_keeps(i) - self.qk_norms_keep() - output)
        if model.positions == "rope":
            tape.spike(2 * kv)
            tape.spike(2 * q)
        if model.qk_norm:
            for part, heads, width in (("k", s.kv_heads, s.kv), ("q", s.heads, s.q)):
                kept = 0 if self.sharded and self.coarse else s.c * s.tokens * width
                shape = self.qk_shape(heads, width)
                self.norm_backward(f"{name}.{part}_norm", *shape, kept, sharded=self.sharded)
        maps = {f"{name}.q": s.q, f"{name}.k": s.kv, f"{name}.v": s.kv}
        self.fan_out_backward(maps, input)

    def mlp(self, i: int, keep: bool, stop: bool = False) -> None:
        """As `attention`."""
        if self.mixture and self.model.is_moe(i):
            self.mixture.forward(keep, stop, self.again("mlp"))
            return
        s, n = self.s, self.s.c * self.s.tokens * self.s.ffn
        maps = 2 if self.model.gated else 1
        self.fan_out(*[s.ffn] * maps)
        self.tape.take(n)
        self.leave_or_stop(self.model.mlp_bias, stop)
        if not keep:
            self.tape.drop((maps + 1) * n)

    def mlp_backward(self, name: str, i: int) -> None:
        """As `attention_backward`."""
        if self.mixture and self.model.is_moe(i):
            self.mixture.backward(name.removesuffix("mlp") + "moe")
            if self.again("mlp") and not self.mixture.keeps_input:
                self.tape.drop(self.stream)
            return
        s, n = self.s, self.s.c * self.s.tokens * self.s.ffn
        self.leave_backward(f"{name}.down", s.ffn, n)
        self.product_backward(n)
        maps = ("gate", "up") if self.model.gated else ("up",)
        self.fan_out_backward({f"{name}.{m}": s.ffn for m in maps}, self.stream)

    # -- dropout: [t, hidden] -> the same

    def dropout(self, keep: bool) -> None:
        """Leaves the output beside the input: element numbers, three words of random bits."""
        s, n = self.s, self.s.rows * self.s.hidden
        if self.model.dropout:
            self.tape.spike(24 * n)
            self.tape.spike(8 * n + n + 2 * s.c * n)
            self.tape.take(s.c * n + (n if keep else 0))

    def dropout_backward(self, then: Callable[[], None] = lambda: None) -> None:
        """Leaves a gradient of its own beside the output's, of which `then` may let go; drops the
        mask."""
        if self.model.dropout:
            self.tape.take(self.stream)
            then()
            self.tape.drop(self.s.rows * self.s.hidden)
            self.tape.spike(self.stream)

    # -- a layer

    def layer(self, i: int, keep: bool, stop: bool = False) -> None:
        """Leaves the output and, with `keep`, what backward needs. `stop`: makes only that."""
        s, tape, stream = self.s, self.tape, self.stream
        for branch in ("attention", "mlp"):
            last = stop and branch == "mlp" and not self.after and not self.model.dropout
            module = getattr(self, branch)
            if self.before:
                self.norm(s.rows, s.hidden, keep and not self.again("norm"))
            if branch == "mlp":
                tape.drop(self.local)
            module(i, keep and not self.again(branch), last)
            if self.before and not keep:
                tape.drop(stream)
            ends = 0 if last else stream
            if self.after:
                self.norm(s.rows, s.hidden, keep and not self.again("norm"))
                tape.drop(0 if keep else stream)
            self.dropout(keep)
            if not (stop and branch == "mlp"):
                tape.take(stream)
            # The branch's result is a local name until the next one takes its place.
            self.local = ends
            if self.model.dropout:
                tape.drop(stream)
            if branch == "mlp":
                mixed = self.mixture and self.model.is_moe(i) and self.mixture.gathers
                tape.drop(self.local, "buffers" if mixed and ends else "")
        if not keep:
            tape.drop(stream)  # the stream between the branches

    def again(self, module: str) -> bool:
        """Whether a module is recomputed by itself."""
        return module in self.layout.recomputed

    def layer_backward(self, i: int) -> None:
        """Turns the output's gradient into the input's and drops all that the layer kept."""
        s, tape, unit = self.s, self.tape, f"layers.{i}"
        for branch in ("mlp", "attention"):
            self.dropout_backward()
            if self.after:
                if self.again("norm"):
                    self.norm(s.rows, s.hidden, keep=True)
                    tape.drop(self.stream)
                # Its input is dropped; what it made is new where nothing before it was.
                kept = self.stream if self.model.dropout else 0
                self.norm_backward(f"{unit}.{branch}_out_norm", s.rows, s.hidden, kept)
            if self.again(branch):
                # The last map asks for its input once its gradient has been gathered.
                mixed = branch == "mlp" and self.model.is_moe(i)
                maps = branch == "attention" or has_mlp(self.model, i)
                gathered = self.whole if self.rows and maps else 0
                own = self.stream if self.rows and (self.after or self.model.dropout) else 0
                own = 0 if mixed else own  # which experts need too
                tape.drop(own)
                with tape.during(gathered, "buffers"):
                    getattr(self, branch)(i, keep=True, stop=True)
                tape.take(own)
            getattr(self, f"{branch}_backward")(f"{unit}.{branch}", i)
            if self.before:
                if self.again("norm"):
                    self.norm(s.rows, s.hidden, keep=True)
                    tape.drop(self.stream)
                kept = self.input_keeps(i, branch)
                name, then = f"{unit}.{branch}_norm", self.sum_gradients
                self.norm_backward(name, s.rows, s.hidden, kept, then=then)
            else:
                self.sum_gradients()


def _number(unit: str) -> int:
    """ "layers.7" -> 7."""
    return int(unit.rpartition(".")[2])
