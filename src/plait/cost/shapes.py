"""Sizes of what one micro batch makes on one rank."""

from dataclasses import dataclass

from plait.cost.dtypes import dtypes_of
from plait.spec.job import DTYPE_BYTES, Job
from plait.spec.parameters import kv_copies


def local_seq(job: Job) -> int:
    """Tokens of a sample that a rank holds."""
    return job.train.seq_len // job.layout.cp


@dataclass(frozen=True)
class Shapes:
    """Sizes of one micro batch on one rank.

    Attributes:
        c, a: bytes of a compute element and of an accurate one (at least float32).
        seq, tokens, rows: tokens of a sample and of a micro batch that are on this rank, and of its
            part of the residual stream.
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
        seq = local_seq(job)
        tokens = layout.micro_batch * seq
        kv_heads = model.kv_heads * kv_copies(model, layout) // tp
        return Shapes(
            c=c,
            a=max(c, 4),
            seq=seq,
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
