"""A step of one rank, tensor by tensor: what its modules take, keep for backward and drop.

Each method follows the code of the same name in `models/` and `parallel/` and tells a `Tape` the
bytes; the order is that of the program, so the peaks come out where they are. c is a byte of the
compute dtype, a of an accurate one. "Keeps" is what autograd holds until the module's backward;
the rest is dropped where Python drops it. Below, n is a number of elements.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from plait.cost.buffers import Engine
from plait.cost.dtypes import dtypes_of
from plait.cost.tape import Tape
from plait.spec.buckets import Bucket
from plait.spec.job import DTYPE_BYTES, Job
from plait.spec.parameters import kv_copies


@dataclass(frozen=True)
class Shapes:
    """Sizes of one micro batch on one rank.

    Attributes:
        c, a: bytes of a compute element and of an accurate one (at least float32).
        seq, tokens, rows: tokens of a sample, of a micro batch, of this rank's stream.
        hidden, q, kv, heads, kv_heads, dim, ffn, vocab: widths on this rank.
    """

    c: int
    a: int
    seq: int
    tokens: int
    rows: int
    hidden: int
    q: int
    kv: int
    heads: int
    kv_heads: int
    dim: int
    ffn: int
    vocab: int

    @staticmethod
    def of(job: Job) -> "Shapes":
        model, layout = job.model, job.layout
        c, tp = DTYPE_BYTES[dtypes_of(job).compute], layout.tp
        tokens = layout.micro_batch * job.train.seq_len
        kv_heads = model.kv_heads * kv_copies(model, layout) // tp
        return Shapes(
            c=c,
            a=max(c, 4),
            seq=job.train.seq_len,
            tokens=tokens,
            rows=tokens // tp if layout.sequence_parallel else tokens,
            hidden=model.hidden,
            q=model.heads // tp * model.head_dim,
            kv=kv_heads * model.head_dim,
            heads=model.heads // tp,
            kv_heads=kv_heads,
            dim=model.head_dim,
            ffn=model.ffn // tp,
            vocab=-(-model.vocab // tp),
        )


class Step:
    """A step as `train.program.Program.step` runs it."""

    def __init__(self, job: Job, tape: Tape, buckets: Sequence[Bucket]):
        self.job, self.model, self.layout = job, job.model, job.layout
        self.s, self.tape = Shapes.of(job), tape
        self.engine = Engine(job, tape, buckets)
        self.numel = {e.parameter.name: e.numel for b in buckets for e in b.entries}
        s = self.s
        self.stream = s.c * s.rows * s.hidden  # this rank's part of the residual stream
        self.whole = s.c * s.tokens * s.hidden  # the same of all tp ranks
        self.tp, self.split = job.layout.tp > 1, s.rows < s.tokens
        self.coarse = s.c < s.a
        self.before = job.model.norm_at in ("input", "both")  # norms of a branch
        self.after = job.model.norm_at in ("output", "both")

    def run(self) -> None:
        """All micro batches and the optimizer."""
        tape, engine, n = self.tape, self.engine, self.model.layers
        full = self.layout.recompute == "full"
        for micro in range(self.job.train.accumulation):
            engine.begin_micro_batch(first=micro == 0)
            tape.enter("forward", "activations")
            self.context(tape.take)
            engine.gather(0, 1)
            self.embed()
            engine.release(0)
            for i in range(n):
                engine.gather(i + 1, i + 2)
                self.layer(i, keep=not full)
                engine.release(i + 1)
            tape.enter("loss", "logits")
            engine.gather(n + 1)
            self.head()
            engine.release(n + 1)
            engine.gather(n + 1, n)
            self.head_backward()
            engine.gather(n, n - 1)
            tape.enter("backward", "activations")
            for i in reversed(range(n)):
                engine.gather(i + 1, i)
                if full:
                    self.layer(i, keep=True, stop=True)
                self.layer_backward(i)
            engine.gather(0)
            self.embed_backward()
            self.context(tape.drop)
            engine.finish()
        tape.enter("optimizer", "optimizer")
        tape.spike(engine.cast)

    def context(self, change: Callable[[int], None]) -> None:
        """Positions and token numbers (int64); the rotary tables, cos and sin for each theta."""
        s, model = self.s, self.model
        n = 8 * (s.seq + s.tokens)
        if model.positions == "rope":
            n += 2 * s.c * s.seq * s.dim * (1 if model.rope_local_theta is None else 2)
        if any(self.masked(i) for i in range(model.layers)):
            # One for all layers; made from distances, int64, and two conditions.
            n += s.seq * s.seq
            if change == self.tape.take:
                self.tape.spike(11 * s.seq * s.seq)
        change(n)

    # -- norm: [rows, width] -> the same. Keeps its input, which is its maker's to count

    def norm_keeps(self, rows: int, width: int, sharded: bool) -> int:
        """What a norm keeps beside its input."""
        s, n = self.s, rows * width
        if sharded:  # the input made accurate, its root mean square, the result before scaling
            return (s.a * n if self.coarse else 0) + s.a * n + s.a * rows
        return s.a * rows if self.model.norm == "rms" else 2 * s.c * rows

    def norm(self, rows: int, width: int, keep: bool, sharded: bool = False) -> None:
        """Leaves the output."""
        s, tape, n = self.s, self.tape, rows * width
        keeps = self.norm_keeps(rows, width, sharded)
        if sharded or (self.model.norm == "rms" and self.coarse):
            # Accurate copies of the input and of the result, beside the result.
            tape.spike(keeps + s.c * n + (1 if sharded else 2) * s.a * n)
        tape.take(s.c * n + (keeps if keep else 0))

    def norm_backward(self, name: str, rows: int, width: int, sharded: bool = False) -> None:
        """Turns the output's gradient into the input's; drops what the norm kept."""
        s, tape, n = self.s, self.tape, rows * width
        if self.model.norm == "rms" or sharded:
            # Coarse: accurate copies of input and gradient, their product, the result.
            tape.spike((4 * s.a + s.c if self.coarse else 2 * s.a) * n)
        else:
            tape.spike(s.c * n)
        tape.drop(self.norm_keeps(rows, width, sharded))
        self.arrive(f"{name}.weight")
        if self.model.norm == "layer":
            self.arrive(f"{name}.bias")

    # -- linear maps

    def weight(self, name: str) -> int:
        """Bytes of a parameter's gradient; a tied head's is the embedding's."""
        known = name if name in self.numel else "embed.tokens.weight"
        return self.s.c * self.numel[known]

    def arrive(self, *names: str, weights: bool = False) -> None:
        """Gradients of parameters are added to their buckets and dropped."""
        for name in names:
            if name in self.numel:
                self.engine.arrive(name)
                if weights:
                    self.tape.drop(self.weight(name))

    def fan_out(self, *widths: int) -> None:
        """Leaves the outputs of maps of one input."""
        self.tape.take(self.whole if self.split else 0, "buffers")
        self.tape.take(self.s.c * self.s.tokens * sum(widths))
        self.tape.drop(self.whole if self.split else 0, "buffers")

    def fan_out_backward(self, widths: dict[str, int], input: str = "activations") -> None:
        """Turns the outputs' gradients into the input's, [t, hidden]; drops the kept input."""
        s, tape = self.s, self.tape
        names = [f"{name}.weight" for name in widths]
        if not self.tp:
            for done, (name, width) in enumerate(reversed(widths.items())):
                weight = f"{name}.weight"
                tape.take(self.stream + self.weight(weight))
                tape.drop(s.c * s.tokens * width + (self.stream if done else 0))
                tape.drop(self.stream if done == len(widths) - 1 else 0, input)
                self.arrive(f"{name}.bias")
                self.arrive(weight, weights=True)
            return
        kind = "buffers" if self.split else ""
        tape.take(self.whole if self.split else 0, "buffers")
        tape.take(self.whole, kind)
        if self.split:
            tape.take(self.stream)
            tape.drop(self.whole, "buffers")
        tape.take(sum(self.weight(name) for name in names))
        tape.drop(self.whole if self.split else 0, "buffers")
        tape.drop(s.c * s.tokens * sum(widths.values()))
        tape.drop(self.stream, input)
        for name, weight in zip(widths, names, strict=True):
            self.arrive(weight, weights=True)
            self.arrive(f"{name}.bias")

    def leave(self, biased: bool) -> None:
        """The output map of a region, [T, .] -> [t, hidden]: leaves its output."""
        with self.tape.during(self.whole if self.split else 0, "buffers"):
            self.tape.take(self.stream)
        if biased and self.tp:
            self.tape.spike(self.stream)

    def leave_backward(self, name: str, width: int, kept: int) -> None:
        """Leaves the gradient of the map's input; drops `kept` bytes that nobody else needs. The
        output's gradient is dropped too, unless it is the stream's and goes on past the branch."""
        s, tape, weight = self.s, self.tape, f"{name}.weight"
        self.arrive(f"{name}.bias")
        own = self.stream if self.after or self.model.dropout else 0
        with tape.during(self.whole if self.split else 0, "buffers"):
            tape.drop(own if self.split else 0)
            tape.take(s.c * s.tokens * width + self.weight(weight))
            tape.drop(kept + (0 if self.split else own))
        self.arrive(weight, weights=True)

    # -- attention and MLP: [t, hidden] -> [t, hidden]

    def attention(self, i: int, keep: bool, stop: bool = False) -> None:
        """Leaves the output, and with `keep` what backward needs. `stop`: makes only that."""
        s, tape, model = self.s, self.tape, self.model
        q, kv, heads = s.c * s.tokens * s.q, s.c * s.tokens * s.kv, s.tokens * s.heads
        self.fan_out(s.q, s.kv, s.kv)
        if model.qk_norm:
            for n, width in ((s.heads, s.q), (s.kv_heads, s.kv)):
                self.norm(*self.qk_shape(n, width), True, self.sharded)
            tape.drop(s.c * s.tokens * (s.q + s.kv) if self.sharded and self.coarse else 0)
        if model.positions == "rope":
            tape.take(q + kv)
            tape.spike(kv)  # of the second: the input turned by half a head
            tape.drop(q + kv)
        if self.masked(i):  # as numbers, in the compute dtype
            tape.take(s.c * s.seq * s.seq)
        tape.take(q + s.a * heads)
        if not stop:
            self.leave(model.o_bias)
        if not keep:
            tape.drop(self.attention_keeps(i))

    def attention_keeps(self, i: int) -> int:
        """Queries, keys, values, the output, log-sum-exps; what norms of queries and keys keep."""
        s = self.s
        n = s.c * s.tokens * (2 * s.q + 2 * s.kv) + s.a * s.tokens * s.heads
        return n + self.qk_norms_keep() + (s.c * s.seq * s.seq if self.masked(i) else 0)

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

    def masked(self, i: int) -> bool:
        """A window shorter than the sample needs a mask, [seq, seq]."""
        return not self.model.is_full_attention(i) and self.s.seq > self.model.window

    def attention_backward(self, name: str, i: int) -> None:
        """Leaves the input's gradient; the output's is the caller's."""
        s, tape, model = self.s, self.tape, self.model
        q, kv = s.c * s.tokens * s.q, s.c * s.tokens * s.kv
        self.leave_backward(f"{name}.o", s.q, 0)
        tape.take(q + 2 * kv)
        tape.drop(q)
        tape.drop(self.attention_keeps(i) - self.qk_norms_keep())
        if model.positions == "rope":
            tape.spike(2 * kv)
            tape.spike(2 * q)
        if model.qk_norm:
            for part, heads, width in (("k", s.kv_heads, s.kv), ("q", s.heads, s.q)):
                shape = self.qk_shape(heads, width)
                self.norm_backward(f"{name}.{part}_norm", *shape, self.sharded)
                tape.drop(0 if self.sharded and self.coarse else s.c * s.tokens * width)
        self.fan_out_backward({f"{name}.q": s.q, f"{name}.k": s.kv, f"{name}.v": s.kv})

    def mlp(self, i: int, keep: bool, stop: bool = False) -> None:
        """As `attention`."""
        s, n = self.s, self.s.c * self.s.tokens * self.s.ffn
        maps = 2 if self.model.gated else 1
        self.fan_out(*[s.ffn] * maps)
        self.tape.take(n)
        if not stop:
            self.leave(self.model.mlp_bias)
        if not keep:
            self.tape.drop((maps + 1) * n)

    def mlp_backward(self, name: str, i: int) -> None:
        """As `attention_backward`."""
        s, tape, n = self.s, self.tape, self.s.c * self.s.tokens * self.s.ffn
        self.leave_backward(f"{name}.down", s.ffn, n)
        if self.model.gated:
            tape.take(3 * n)  # both gradients and a factor of one
            tape.drop(4 * n)  # the factor, the product's gradient, gate, up
            self.fan_out_backward({f"{name}.gate": s.ffn, f"{name}.up": s.ffn})
        else:
            tape.take(n)
            tape.drop(2 * n)
            self.fan_out_backward({f"{name}.up": s.ffn})

    # -- dropout: [t, hidden] -> the same

    def dropout(self, keep: bool) -> None:
        """Leaves the output beside the input: element numbers, three words of random bits."""
        s, n = self.s, self.s.rows * self.s.hidden
        if self.model.dropout:
            self.tape.spike(24 * n)
            self.tape.spike(8 * n + n + 2 * s.c * n)
            self.tape.take(s.c * n + (n if keep else 0))

    def dropout_backward(self) -> None:
        """Leaves a gradient of its own beside the output's; drops the mask."""
        if self.model.dropout:
            self.tape.take(2 * self.stream)
            self.tape.drop(self.stream + self.s.rows * self.s.hidden)

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
                tape.drop(self.local)
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
                self.norm_backward(f"{unit}.{branch}_out_norm", s.rows, s.hidden)
                # Its input is dropped; what it made is new where nothing before it was.
                tape.drop(self.stream if self.model.dropout else 0)
            if self.again(branch):
                getattr(self, branch)(i, keep=True, stop=True)
            getattr(self, f"{branch}_backward")(f"{unit}.{branch}", i)
            if self.before:
                if self.again("norm"):
                    self.norm(s.rows, s.hidden, keep=True)
                    tape.drop(self.stream)
                self.norm_backward(f"{unit}.{branch}_norm", s.rows, s.hidden)
                tape.drop(self.stream)  # its input
            # Both ways into the branch's input are summed into a tensor of their own.
            tape.spike(self.stream)
            tape.drop(self.stream)

    # -- embedding and head

    def embed(self) -> None:
        """Leaves the residual stream."""
        s, tape, model = self.s, self.tape, self.model
        if self.tp:
            tape.take(9 * s.tokens)  # where tokens are looked up (int64), which are not (bool)
            tape.spike(2 * self.whole)
            with tape.during(self.whole if self.split else 0, "buffers"):
                tape.take(self.stream)
        else:
            tape.take(self.stream)
        if model.embed_scale:
            tape.spike(self.stream)
        if model.positions == "learned":
            tape.take(8 * s.tokens)
            tape.spike(2 * self.stream)
        if model.embed_norm:
            self.norm(s.rows, s.hidden, keep=True)
        self.dropout(keep=True)
        if model.dropout:
            tape.drop(self.stream)

    def embed_backward(self) -> None:
        """Drops the gradient of the residual stream."""
        s, tape, model = self.s, self.tape, self.model
        self.dropout_backward()
        if model.dropout:
            tape.drop(self.stream)
        if model.embed_norm:
            self.norm_backward("embed.norm", s.rows, s.hidden)
            tape.drop(self.stream)
        if model.positions == "learned":
            tape.take(self.weight("embed.positions.weight"))
            self.arrive("embed.positions.weight", weights=True)
            tape.drop(8 * s.tokens)
        if model.embed_scale:
            tape.spike(self.stream)
        weight = "embed.tokens.weight"
        if self.tp:
            if self.split:
                tape.take(self.whole, "buffers")
                tape.drop(self.stream)
                tape.take(self.whole)
                tape.drop(self.whole, "buffers")
            else:
                tape.take(self.whole)
                tape.drop(self.stream)
            tape.drop(9 * s.tokens)
        tape.take(self.weight(weight))
        tape.drop(self.whole)
        if model.tied:  # autograd adds the head's gradient and this one up to a third
            tape.take(self.weight(weight))
            tape.drop(self.weight(weight), "logits")
            tape.drop(self.weight(weight))
        self.arrive(weight, weights=True)

    def head(self) -> None:
        """Leaves the log probabilities, or under tp the softmax."""
        s, tape = self.s, self.tape
        n = s.tokens * s.vocab
        self.norm(s.rows, s.hidden, keep=True)
        self.fan_out(s.vocab)
        if self.model.logit_softcap:
            tape.take(s.c * n)
            tape.spike(s.c * n)
        tape.take(s.a * n)
        if not self.tp and self.coarse:
            tape.spike(s.a * n)
        tape.drop(s.c * n)

    def head_backward(self) -> None:
        """Leaves the gradient of the residual stream."""
        s, tape = self.s, self.tape
        n = s.tokens * s.vocab
        if not self.tp:
            tape.spike(s.a * n + (s.c * n if self.coarse else 0))
        elif self.coarse:
            tape.spike(s.c * n)
        tape.drop(s.a * n - s.c * n)
        if self.model.logit_softcap:
            tape.spike(s.c * n)
            tape.drop(s.c * n)
        self.fan_out_backward({"head.output": s.vocab}, input="logits")
        self.norm_backward("head.norm", s.rows, s.hidden)
        # From here on it is a layer's affair, and the head's input has been used.
        tape.drop(self.stream, "logits")
        tape.take(self.stream, "activations")
        tape.drop(self.stream, "activations")
