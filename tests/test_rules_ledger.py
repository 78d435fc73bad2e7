"""Rules that go by the ledger, with numbers worked out by hand or by the report."""

from dataclasses import replace

import pytest

from plait.cost.ledger import MEMORY_CLASSES
from plait.report.build import report
from plait.rules import check
from plait.rules.numbers import in_bytes
from plait.spec.jobfile import read_job


def plan(gpus, model="llama3.1-8b", **said):
    return read_job("plan", gpus=gpus, model=model, overrides={"seq_len": 4096} | said)


def one(job, rule):
    """The finding of a rule, None where it is silent."""
    found = [f for f in check(job, "plan") if f.rule == rule]
    assert len(found) < 2
    return found[0] if found else None


def needs(job) -> int:
    memory = report(job, [])["memory"]
    return memory["peak_bytes"] + memory["reserved_bytes"] + memory["context_bytes"]


def followed(finding, gpus, **said):
    changed = {path.rpartition(".")[2]: value for path, value in finding.suggest.items()}
    return plan(gpus, **(said | changed))


# ------------------------------------------------------------------------------------------
# Memory


@pytest.mark.parametrize(
    "said",
    [
        {"seq_len": 8192},
        {"zero": 0},
        {"micro_batch": 8},
        {"pp": 4, "schedule": "gpipe", "accumulation": 32, "tp": 2},
        {"tp": 2, "sequence_parallel": False, "micro_batch": 8},
    ],
)
def test_what_does_not_fit_says_where_and_what_helps(said):
    job = plan("h100:8", **said)
    answer = report(job, [])
    finding = one(job, "memory-over-device")
    assert answer["fits"] is False
    fullest = max(answer["memory"]["by_stage"], key=lambda row: row["total"])
    largest = max(MEMORY_CLASSES, key=lambda name: fullest[name])
    for words in (
        f"stage {fullest['stage']} needs {in_bytes(needs(job))} of 74.5 GiB",
        f"when {fullest['moment']} is at its fullest",
        f"{largest} are {in_bytes(fullest[largest])}",
    ):
        assert words in finding.message
    after = followed(finding, "h100:8", **said)
    assert report(after, [])["fits"]
    assert in_bytes(needs(after)) in finding.message or len(finding.suggest) > 1
    assert one(after, "memory-over-device") is None


def test_what_nothing_near_makes_fit_is_said():
    finding = one(plan("h100:1", model="llama3.1-70b"), "memory-over-device")
    assert "nothing near makes it fit" in finding.message


def test_without_a_device_nothing_is_too_much():
    job = read_job("plan", ranks=1, model="llama3.1-405b")
    assert one(job, "memory-over-device") is None


def test_recompute_that_is_not_needed():
    """Operations of a token, in 1e9: layers 2 x 6.979 and attention 1.07, the head 1.05; a step has
    three times as many, 48.3, and the layers' 15.0 are 31% of that."""
    job = plan("h100:8", tp=8, recompute="full")
    finding = one(job, "recompute-without-need")
    assert finding.suggest == {"layout.recompute": "none"}
    assert "31% more operations" in finding.message
    assert in_bytes(needs(plan("h100:8", tp=8))) in finding.message
    long = {"tp": 8, "recompute": "full", "seq_len": 131_072}
    assert one(plan("h100:8", **long), finding.rule).nearest == "selective"
    assert one(plan("h100:8", micro_batch=2, **long), finding.rule) is None


# ------------------------------------------------------------------------------------------
# Links


def test_a_part_of_a_mesh_has_a_part_of_its_links():
    """Of 32 layers and the ends 65 regions: gathered and scattered forward, backward gathered twice
    and scattered: 325 x 32 MiB, half of it sent. To one of seven peers 64 GB/s of 448."""
    finding = one(plan("mi300x:16", tp=2), "part-of-a-mesh")
    assert in_bytes(325 * 2**24) == "5.08 GiB"
    assert "64 of the 448 GB/s" in finding.message
    assert "5.08 GiB a step take 85.2 ms instead of 12.2 ms" in finding.message
    assert finding.nearest == 8
    assert one(plan("mi300x:16", tp=8), "part-of-a-mesh") is None
    assert one(plan("h100:16", tp=2), "part-of-a-mesh") is None


def test_a_domain_smaller_than_the_node():
    """Every rule goes by the domain: 4 devices of a node of 8."""
    whole = plan("h100:32", tp=8)
    parts = replace(whole, cluster=replace(whole.cluster, fast_domain=4))
    assert one(whole, "tp-beyond-fast-domain") is None
    assert one(parts, "tp-beyond-fast-domain").nearest == 4
    sharded = plan("h100:32", zero=3, recompute="full")
    parts = replace(sharded, cluster=replace(sharded.cluster, fast_domain=4))
    suggest = one(parts, "zero-3-over-slow-links").suggest
    assert suggest == {"layout.dp_shard": 4, "layout.dp_replicate": 8}
    suggest = one(sharded, "zero-3-over-slow-links").suggest
    assert suggest == {"layout.dp_shard": 8, "layout.dp_replicate": 4}


def test_one_rack_has_no_slow_links():
    """72 devices of GB200 in nodes of 4; 144 are two racks."""
    said = {"model": "deepseek-v3", "recompute": "full", "accumulation": 32}
    for legal in (plan("gb200:72", ep=8, **said), plan("gb200:144", ep=8, **said)):
        assert not any(f.level == "error" for f in check(legal, "plan"))
        assert one(legal, "ep-beyond-fast-domain") is None
    far = one(plan("gb200:144", ep=16, **said), "ep-beyond-fast-domain")
    assert "ep 16 does not divide the fast domain of 72 devices" in far.message
    assert far.nearest == 8
    assert one(plan("h100:144", ep=16, **said), "ep-beyond-fast-domain").nearest == 8


def test_keys_are_passed_on_rather_than_gathered_over_slow_links():
    said = {"cp": 16, "cp_method": "all-gather", "seq_len": 131_072, "recompute": "full"}
    finding = one(plan("h100:64", **said), "keys-gathered-far")
    assert finding.suggest == {"layout.cp_method": "ring"}
    assert one(plan("h100:64", **(said | {"cp": 8})), "keys-gathered-far") is None


def test_a_ring_that_shows_is_dealt_out_over_heads():
    """1,099 positions hide a block on 450 GB/s; cp 8 of 4,096 has 512, ulysses 4 makes it 2,048."""
    finding = one(plan("h100:8", cp=8), "ring-not-hidden")
    assert finding.suggest == {"layout.ulysses": 4}
    assert one(plan("h100:8", cp=8, ulysses=4), "ring-not-hidden") is None


# ------------------------------------------------------------------------------------------
# More often than need be


def test_a_tied_table_lies_on_two_stages():
    """151,936 x 1,024 in bfloat16."""
    said = {"model": "qwen3-0.6b", "pp": 2, "accumulation": 16}
    finding = one(plan("h100:8", **said), "tied-over-stages")
    assert in_bytes(151_936 * 1024 * 2) in finding.message
    assert finding.suggest == {"layout.schedule": "zbv", "layout.vpp": 2}
    assert one(followed(finding, "h100:8", **said), "tied-over-stages") is None
    assert one(plan("h100:8", pp=2, accumulation=16), "tied-over-stages") is None


def test_copied_kv_heads_in_numbers():
    """A head of 128: k and v of 4,096 x 128 weights, of 4,096 tokens; 8 heads on 16 ranks."""
    finding = one(plan("gb200:64", tp=16), "kv-replication")
    for words in ("computed 2 times", "2 MiB of weights and 2 MiB", "1 MiB and 1 MiB"):
        assert words in finding.message
    assert finding.nearest == 8


def test_whole_experts_send_less():
    said = {"model": "mixtral-8x7b", "tp": 2, "etp": 2, "ep": 4, "zero": 3, "recompute": "full"}
    finding = one(plan("h100:8", **said), "experts-are-cut")
    assert finding.suggest == {"layout.etp": 1, "layout.ep": 8}
    assert one(followed(finding, "h100:8", **said), "experts-are-cut") is None
