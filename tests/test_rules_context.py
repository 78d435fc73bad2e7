"""Rules of context parallelism: what does not divide, what goes over slow links or is copied."""

import pytest

from plait.rules import check
from plait.spec.jobfile import draft_job, read_job

HEADS = {"model": "llama3.1-8b", "seq_len": 8192}  # 32 heads, 8 KV heads


@pytest.mark.parametrize(
    ("ranks", "said", "rule", "where", "nearest"),
    [
        # 24 divides neither 32 heads nor 8 KV heads; of its divisors 8 is nearest.
        (24, {"cp": 24, "ulysses": 24, "seq_len": 24576}, "ulysses-divides-heads", "ulysses", 8),
        # 8 heads and 2 KV heads on each of 4 tp ranks.
        (64, {"tp": 4, "cp": 16, "ulysses": 16}, "ulysses-divides-heads", "ulysses", 8),
        (64, {"tp": 4, "cp": 16, "ulysses": 8}, "ulysses-divides-heads", None, None),
        (3, {"cp": 3}, "cp-divides-sequence", "seq_len", 8190),
        # 3 ranks, each with pieces for 4 more: multiples of 12, of 6 with two samples.
        (12, {"cp": 3, "tp": 4}, "cp-divides-sequence", "seq_len", 8184),
        (12, {"cp": 3, "tp": 4, "seq_len": 8190}, "sequence-pieces", "seq_len", 8184),
        (12, {"cp": 3, "tp": 4, "seq_len": 8190, "micro_batch": 2}, "sequence-pieces", None, None),
        (3, {"cp": 3, "seq_len": 2}, "cp-divides-sequence", "seq_len", 3),
        (64, {"cp": 64, "seq_len": 131072}, "cp-divides-sequence", None, None),
    ],
)
def test_what_context_parallelism_divides(ranks, said, rule, where, nearest):
    job = read_job("plan", ranks=ranks, overrides=HEADS | said)
    errors = [f for f in check(job, "plan") if f.level == "error"]
    if where is None:
        assert rule not in [f.rule for f in errors]
        return
    (finding,) = errors
    assert (finding.rule, finding.nearest) == (rule, nearest)
    assert finding.where.endswith(where)
    job = read_job("plan", ranks=ranks, overrides=HEADS | said | {where: nearest})
    assert [f for f in check(job, "plan") if f.level == "error"] == []


def long(rule, **said):
    """A rule's finding about Llama 3.1 8B on 64 H100s at its own 131,072 tokens, if any."""
    given = {"model": "llama3.1-8b", "gpus": "h100:64"}
    job = read_job("plan", overrides={"seq_len": 131_072} | said, **given)
    found = [f for f in check(job, "plan") if f.rule == rule]
    return found[0] if found else None


def test_ulysses_belongs_on_fast_links():
    """2 (2 x 32 + 2 x 16) heads of 128, 8,192 tokens, bfloat16: 384 MiB, 15 of 16 parts of it."""
    finding = long("ulysses-beyond-fast-domain", cp=16, ulysses=16)
    assert (finding.level, finding.suggest) == ("warning", {"layout.ulysses": 8})
    assert "360 MiB" in finding.message
    assert long("ulysses-beyond-fast-domain", cp=16, ulysses=8) is None
    beyond = long("ulysses-beyond-fast-domain", cp=8, tp=2, ulysses=8)
    assert beyond.suggest == {"layout.ulysses": 4}


def test_ulysses_copies_heads_beyond_their_number():
    """8 KV heads of 128, keys and values of 8,192 tokens, bfloat16: 32 MiB, and twice that."""
    finding = long("ulysses-copies-heads", cp=16, ulysses=16)
    assert (finding.level, finding.suggest) == ("warning", {"layout.ulysses": 8})
    assert "copied 2 times" in finding.message
    assert "64 MiB" in finding.message
    assert "32 MiB" in finding.message
    assert long("ulysses-copies-heads", cp=16, ulysses=8) is None


def test_a_short_piece_does_not_hide_a_ring():
    """A fourth as many KV heads, 2 bytes, 989 TFLOP/s: 494 T / B positions; 9,890 over 50 GB/s,
    1,099 over 450 GB/s."""
    finding = long("ring-not-hidden", cp=64)
    assert finding.level == "note"
    assert "2048 positions" in finding.message
    # 2 bytes / 4 x 989e12 / 50e9, and 64 such pieces.
    assert "below about 9890 a block" in finding.message
    assert f"from {9890 * 64} tokens on" in finding.message
    assert long("ring-not-hidden", cp=64, seq_len=9890 * 64) is None
    assert long("ring-not-hidden", cp=8) is None
    assert "about 109" in long("ring-not-hidden", cp=8, seq_len=4096).message
    assert long("ring-not-hidden", cp=64, cp_method="all-gather") is None


@pytest.mark.parametrize(
    ("said", "where"),
    [
        ({"ulysses": 2}, "ulysses"),
        ({"cp": 16, "ulysses": 32}, "ulysses"),
        ({"cp": 16, "seq_len": 8}, "seq_len"),
    ],
)
def test_a_ring_of_no_ranks_or_positions_is_refused(said, where):
    """On a named device too, for whose links pitfalls are worked out."""
    job, findings = draft_job("plan", overrides=said, model="llama3.1-8b", gpus="h100:64")
    errors = [f for f in findings + check(job, "plan") if f.level == "error"]
    assert {f.where.rpartition(".")[2] for f in errors} == {where}


def test_short_samples_need_no_context_parallelism():
    said = {"seq_len": 4096, "cp": 2, "zero": 3, "accumulation": 2}
    finding = long("cp-without-need", **said)
    assert finding.level == "warning"
    assert finding.suggest["layout.dp_shard"] == 64
    changes = {path.rpartition(".")[2]: value for path, value in finding.suggest.items()}
    job = read_job("plan", gpus="h100:64", model="llama3.1-8b", overrides=said | changes)
    assert [f for f in check(job, "plan") if f.level == "error"] == []
    assert job.train.global_batch == 64
    # One sample for both, or samples that fit on no rank.
    assert long("cp-without-need", **(said | {"accumulation": 1})) is None
    assert long("cp-without-need", **(said | {"seq_len": 131_072})) is None
