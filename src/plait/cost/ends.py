"""The two ends of a model on one rank, tensor by tensor: embedding and head, with the loss.

It mirrors `models.transformer.Embed` and `Head`, and what `parallel/tensor.py` makes of them where
the vocabulary is cut over the tp ranks.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.cost.activations import Chunk


class Ends:
    """Embedding and head of a chunk that has them, told to its tape."""

    def __init__(self, chunk: "Chunk"):
        self.chunk = chunk

    @property
    def index(self) -> int:
        """Bytes of what looks up learned positions (int64); those that a rank has been given for
        its part of samples do for it, where samples do not have them in a row."""
        chunk = self.chunk
        given = chunk.layout.micro_batch == 1 or chunk.job.data.document_mask
        return 0 if chunk.layout.cp > 1 and given else 8 * chunk.s.tokens

    @property
    def positions(self) -> int:
        """Bytes of those that are the context's own, and outlive it."""
        chunk = self.chunk
        learned = chunk.part.embed and chunk.model.positions == "learned"
        return self.index if learned and chunk.layout.micro_batch == 1 else 0

    def embed(self) -> None:
        """Leaves the residual stream."""
        chunk, s, tape, model = self.chunk, self.chunk.s, self.chunk.tape, self.chunk.model
        if chunk.tp:
            tape.take(9 * s.tokens)  # where tokens are looked up (int64), which are not (bool)
            # What was found, before others' tokens are masked; some lookups mask it in place.
            with tape.during(0 if chunk.rows and chunk.split else chunk.whole):
                with tape.during(chunk.whole if chunk.rows else 0, "buffers"):
                    tape.take(chunk.stream)
        else:
            tape.take(chunk.stream)
        if model.embed_scale:
            tape.spike(chunk.stream)
        if model.positions == "learned":
            tape.take(self.index - self.positions)
            tape.spike(2 * chunk.stream)
        if model.embed_norm:
            chunk.norm(s.rows, s.hidden, keep=True)
        chunk.dropout(keep=True)
        if model.dropout:
            tape.drop(chunk.stream)

    def embed_backward(self) -> None:
        """Drops the gradient of the residual stream."""
        chunk, s, tape, model = self.chunk, self.chunk.s, self.chunk.tape, self.chunk.model
        later, table = chunk.queue is not None, "embed.tokens.weight"
        chunk.dropout_backward(chunk.drop_gradient)
        if model.embed_norm:
            chunk.norm_backward("embed.norm", s.rows, s.hidden, chunk.stream)
            if chunk.given:
                tape.take(chunk.stream)
                chunk.drop_gradient()
        # Both lookups have the same gradient, which is let go after the table's.
        alone = chunk.rows and chunk.split  # the lookup by itself gathers its gradient
        gathers = alone and later  # in W
        alike = (not chunk.tp or gathers) and not model.embed_scale
        if model.positions == "learned" and later:
            held = self.index + (0 if alike else chunk.stream)
            chunk.put_off(["embed.positions.weight"], (tape.kind, held))
            chunk.shared = True
        elif model.positions == "learned":
            tape.take(chunk.weight("embed.positions.weight"))
            chunk.arrive("embed.positions.weight", weights=True)
            tape.drop(self.index)
        if model.embed_scale:
            tape.take(chunk.stream)
            chunk.drop_gradient()
        if chunk.tp and not alone:
            if chunk.rows:
                tape.take(chunk.whole, "buffers")
                chunk.drop_gradient()
                tape.take(chunk.whole)
                tape.drop(chunk.whole, "buffers")
            else:
                tape.take(chunk.whole)
                chunk.drop_gradient()
            tape.drop(s.tokens)
        if gathers:
            held = (tape.kind, chunk.stream + 9 * s.tokens)
            chunk.put_off([table], held, gathered=chunk.whole, early=True)
            chunk.given = chunk.shared = False
            return
        if later:
            chunk.put_off([table], (tape.kind, chunk.whole + (8 * s.tokens if chunk.tp else 0)))
            chunk.given = chunk.shared = False
            return
        with tape.during(chunk.whole if alone else 0, "buffers"):
            tape.take(chunk.weight(table))
        if alone:
            tape.drop(9 * s.tokens)
            chunk.drop_gradient()
        elif chunk.tp:
            tape.drop(chunk.whole + 8 * s.tokens)
        else:
            chunk.drop_gradient()
        if model.tied and chunk.part.head:  # autograd adds the head's gradient and this one up
            tape.take(chunk.weight(table))  # to a third
            tape.drop(chunk.weight(table), "logits")
            tape.drop(chunk.weight(table))
        chunk.arrive(table, weights=True)

    def head(self) -> None:
        """Leaves the log probabilities, or under tp the softmax."""
        chunk, s, tape = self.chunk, self.chunk.s, self.chunk.tape
        n = s.tokens * s.vocab
        chunk.norm(s.rows, s.hidden, keep=True)
        chunk.fan_out(s.vocab)
        if chunk.model.logit_softcap:
            tape.take(s.c * n)
            tape.spike(s.c * n)
        tape.take(s.a * n)
        if chunk.tp:
            self._split_loss()
        else:
            tape.spike(s.a * n if chunk.coarse else 0)
            with tape.during(s.tokens):  # which targets are valid
                tape.spike((8 + s.a) * s.tokens)
                with tape.during(s.a * s.tokens):
                    tape.spike(s.a * s.tokens)
        tape.drop(s.c * n)
        tape.take(s.a)  # the loss, once more as its part of the mean
        tape.spike(s.a)

    @property
    def targets(self) -> int:
        """Under tp which targets are this rank's, and where (bool, int64)."""
        return 9 * self.chunk.s.tokens if self.chunk.tp else 0

    def _split_loss(self) -> None:
        """Leaves which targets are this rank's, and where; a number a token is there for the
        maxima, the logits of targets, the sums."""
        s, tape = self.chunk.s, self.chunk.tape
        t, number = s.tokens, s.a * s.tokens
        with tape.during(number):  # maxima
            tape.take(8 * t)
            tape.spike(3 * t)
            tape.take(t)
            tape.spike(9 * t)
            with tape.during(number):  # of targets
                tape.spike(number + t)
                tape.spike(3 * number)
                with tape.during(2 * number):
                    tape.spike(2 * number + t)

    def head_backward(self) -> None:
        """Leaves the gradient of the residual stream, and two scalars."""
        chunk, s, tape = self.chunk, self.chunk.s, self.chunk.tape
        n, number = s.tokens * s.vocab, s.a * s.tokens
        tape.take(2 * s.a)  # the loss that backward begins with, and its gradient
        tape.drop(s.a)
        with tape.during(s.a):
            if not chunk.tp:
                tape.spike(number + s.tokens)
                with tape.during(number):  # what rows are multiplied by
                    tape.spike(s.a * n + max(number + 8 * s.tokens, s.c * n if chunk.coarse else 0))
            else:
                tape.spike(2 * number)
                with tape.during(number):
                    tape.spike(s.c * n if chunk.coarse else 0)
        tape.drop(s.a * n - s.c * n + self.targets)
        if chunk.model.logit_softcap:
            tape.spike(s.c * n)
            tape.drop(s.c * n)
        chunk.fan_out_backward({"head.output": s.vocab}, chunk.stream, input="logits")
        alone = chunk.units == ("head",)
        if alone:
            chunk.norm_backward("head.norm", s.rows, s.hidden, 0, then=self.leave_head)
        else:
            kept = chunk.stream
            chunk.norm_backward("head.norm", s.rows, s.hidden, kept, "activations")

    def leave_head(self) -> None:
        """From here on it is a layer's affair."""
        tape = self.chunk.tape
        tape.move(self.chunk.stream, "logits", "activations")
        tape.enter("backward", "activations")
