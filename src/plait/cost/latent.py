"""Multi-head latent attention on one rank, tensor by tensor. It mirrors `models.heads.MLA`.

With t rows of the stream and T tokens on a rank, r_q and r_kv the ranks of the latents, heads of
width d = nope + rope and values of v, both over this rank's heads, it keeps for backward, in the
compute dtype, beside its input

    latents      t (2 r_q + 2 r_kv + rope), as they are and normed
    attention    queries, keys, values padded to d, the output: 4 T d; log-sum-exps
    the output   T v once more, as the last map has it

Over the cp ranks attention is `cost.context.Core`, and nothing that is padded is kept.
"""

from typing import TYPE_CHECKING

from plait.cost.context import Core

if TYPE_CHECKING:
    from plait.cost.activations import Chunk


class Latents:
    """Latent attention of a chunk, told to its tape."""

    def __init__(self, chunk: "Chunk"):
        self.chunk = chunk
        mla, s = chunk.model.mla, chunk.s
        self.mla, self.padded = mla, mla.v_dim < mla.nope_dim + mla.rope_dim
        #: Of several heads what is padded is cut away by a copy, of one by a look at the rest.
        self.cut = self.padded and s.heads > 1
        self.q_width, self.kv_width, self.v_width = (
            s.heads * n for n in (mla.nope_dim + mla.rope_dim, mla.nope_dim + mla.v_dim, mla.v_dim)
        )
        self.q, self.kv, self.v, self.rotated = (
            s.c * s.tokens * n
            for n in (self.q_width, self.kv_width, self.v_width, s.heads * mla.rope_dim)
        )
        self.q_rank = mla.q_rank or 0
        self.latent = mla.kv_rank + mla.rope_dim
        self.turns = chunk.model.positions == "rope"

    def _rows(self, width: int) -> int:
        return self.chunk.s.c * self.chunk.s.rows * width

    def _scores(self, core: Core | None) -> int:
        """What attention itself keeps: with narrower values also the padded ones."""
        s = self.chunk.s
        if core:
            return core.keeps + core.output + self._beside(core)
        return 3 * self.q + (self.q if self.padded else self.kv) + s.a * s.tokens * s.heads

    def _beside(self, core: Core) -> int:
        """What is kept because values are a part of it: their heads' unrotated keys."""
        return 0 if core.w.ulysses > 1 else self.kv - self.v

    def forward(self, i: int, keep: bool, stop: bool) -> None:
        """As `Chunk.attention`."""
        chunk, s, mla = self.chunk, self.chunk.s, self.mla
        core = chunk.core(i)
        padded = self.padded and not core
        tape, kept = chunk.tape, 0
        if self.q_rank:
            chunk.fan_out(self.q_rank, self.latent, local=True)
            kept += self._rows(self.q_rank + self.latent)
            self._normed(self.q_rank, self.q_width, keep)
        else:
            chunk.fan_out(self.q_width)
            chunk.fan_out(self.latent, local=True)
            kept += self._rows(self.latent)
        self._normed(mla.kv_rank, self.kv_width, keep)
        rotated = s.c * s.tokens * mla.rope_dim
        names = self.q  # what is there until the end because it has a name
        if chunk.rows:
            tape.take(rotated)
            names += rotated
        if self.turns:
            tape.take(self.rotated)
            tape.spike(self.rotated)
            tape.take(rotated)
            names += self.rotated + rotated
        tape.take(2 * self.q)
        if core:
            core.forward(tape, i, keep)
            if core.w.ulysses > 1:
                names += 2 * self.q + self.kv
                kept -= 0 if keep else core.keeps
        else:
            tape.take(self.q if padded else 0)
            names += self.kv if padded else 0
            tape.take(self.q + s.a * s.tokens * s.heads)
            if not keep:  # padded values have no name any more
                early = (self.q if padded else 0) + s.a * s.tokens * s.heads
                tape.drop(early)
                kept -= early
        cut = self.v if self.cut and not core else 0
        tape.take(cut)
        chunk.leave_or_stop(chunk.model.o_bias, stop)
        tape.drop(names)
        if not keep:
            tape.drop(kept + self._scores(core) + cut)

    def _normed(self, rank: int, width: int, keep: bool) -> None:
        """A latent, normed, to the parts of heads."""
        self.chunk.norm(self.chunk.s.rows, rank, keep)
        self.chunk.fan_out(width, inputs=rank)
        if not keep:
            self.chunk.tape.drop(self._rows(rank))

    def backward(self, name: str, i: int, kept: int) -> None:
        """As `Chunk.attention_backward`; `kept` bytes go with the input."""
        chunk, mla, core = self.chunk, self.mla, self.chunk.core(i)
        tape, q, v = chunk.tape, self.q, self.v
        own = core.output if core else v if self.cut else 0
        whole = q if self.padded and not (self.cut or core) else v
        chunk.leave_backward(f"{name}.o", self.v_width, own, holds=whole)
        if core:
            core.backward(tape, i, chunk.queue is not None)
            tape.drop(self._beside(core))
        else:
            self._fused_backward()
        if self.turns:
            tape.take(self.rotated)
            tape.spike(self.rotated)
        tape.take(self.kv)
        tape.drop(q + v)
        tape.take(q)
        tape.drop(q + (self.rotated if self.turns else 0))
        self._up_backward(
            f"{name}.kv_up", f"{name}.kv_norm", self.kv_width, mla.kv_rank, self.latent
        )
        tape.take(self._rows(self.latent))
        tape.drop(self._rows(mla.kv_rank))
        down = {f"{name}.kv_down": self.latent}
        if self.q_rank:
            self._up_backward(
                f"{name}.q_up", f"{name}.q_norm", self.q_width, self.q_rank, self.q_rank
            )
            down = {f"{name}.q_down": self.q_rank} | down
            chunk.fan_out_backward(down, kept, local=True)
            return
        chunk.fan_out_backward(down, 0, local=True, others=True)
        chunk.fan_out_backward({f"{name}.q": self.q_width}, kept)
        tape.take(chunk.stream)
        tape.drop(2 * chunk.stream)

    def _fused_backward(self) -> None:
        """The output's gradient to those of queries, keys and values, by torch's attention."""
        tape, q, v = self.chunk.tape, self.q, self.v
        if self.padded:
            tape.take(q)
            tape.drop(v)
        tape.take(3 * q)
        tape.drop(q)
        later = self.chunk.queue is not None and not self.cut  # the last map keeps the output
        tape.drop(self._scores(None) - ((q if self.padded else v) if later else 0))
        if self.padded:
            tape.take(v)
            tape.drop(q)

    def _up_backward(self, up: str, norm: str, width: int, rank: int, latent: int) -> None:
        """The gradients of heads' parts to that of a latent before its norm, which was a part of
        one of width `latent`."""
        self.chunk.fan_out_backward({up: width}, self._rows(rank), inputs=rank)
        self.chunk.norm_backward(norm, self.chunk.s.rows, rank, self._rows(latent))
