"""What each tensor-parallel rank holds of a parameter, and strict building of dataclasses."""

from dataclasses import dataclass, replace
from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.spec import presets
from plait.spec.build import check_fields
from plait.spec.cluster import Cluster
from plait.spec.job import Train
from plait.spec.layout import Layout
from plait.spec.model import Model, MoE
from plait.spec.parameters import (
    Place,
    kv_copies,
    local_box,
    local_shape,
    parameter_count,
    parameters,
    partial_over,
    tp_copies,
)

tp_degree = st.sampled_from([1, 2, 4, 8])


@st.composite
def models(draw):
    heads = draw(st.sampled_from([8, 16]))
    model = Model.of(
        "drawn",
        layers=1,
        hidden=8 * heads,
        heads=heads,
        kv_heads=draw(st.sampled_from([1, 2, 4, 8])),
        ffn=8 * draw(st.integers(1, 5)),
        vocab=draw(st.integers(1, 99)),
        mlp=draw(st.sampled_from(["swiglu", "gelu"])),
        norm=draw(st.sampled_from(["rms", "layer"])),
        positions=draw(st.sampled_from(["rope", "learned"])),
        seq=16,
        qk_norm=draw(st.sampled_from([None, "head", "full"])),
        norm_at=draw(st.sampled_from(["input", "output", "both"])),
        **{
            name: draw(st.booleans())
            for name in ("tied", "qkv_bias", "o_bias", "mlp_bias", "sinks", "embed_norm")
        },
    )
    return replace(model, mla=presets.model("tiny-mla").mla) if draw(st.booleans()) else model


@settings(deadline=None)
@given(models(), tp_degree)
def test_local_boxes_tile_each_parameter(model, tp):
    layout = Layout.fill(tp, tp=tp)
    for p in parameters(model):
        boxes = [local_box(p, model, layout, Place(tp=rank)) for rank in range(tp)]
        held = [0] * prod(p.shape[:2])  # every split is of dim 0 or dim 1
        for offset, size in boxes:
            assert all(0 <= o <= o + s <= n for o, s, n in zip(offset, size, p.shape, strict=True))
            whole = local_shape(p, model, layout)
            assert all(s <= w for s, w in zip(size, whole, strict=True))
            columns = p.shape[1] if len(p.shape) > 1 else 1
            width = size[1] if len(p.shape) > 1 else 1
            left = offset[1] if len(p.shape) > 1 else 0
            for row in range(offset[0], offset[0] + size[0]):
                for column in range(left, left + width):
                    held[row * columns + column] += 1
        # Each element is held by as many ranks as the table says, none by fewer.
        assert set(held) == {tp_copies(p, model, layout)}
        if p.split not in ("vocab",):
            assert all(size == local_shape(p, model, layout) for _, size in boxes)


@pytest.mark.parametrize(
    ("tp", "kv_heads", "rows"),
    [
        # 8 heads of 4: which rows of k each rank holds
        (2, 4, [(0, 8), (8, 8)]),
        (4, 4, [(0, 4), (4, 4), (8, 4), (12, 4)]),
        (4, 2, [(0, 4), (0, 4), (4, 4), (4, 4)]),
        (8, 2, [(0, 4)] * 4 + [(4, 4)] * 4),
        (4, 1, [(0, 4)] * 4),
    ],
)
def test_kv_heads_are_copied_beyond_their_number(tp, kv_heads, rows):
    model = Model.of("x", layers=1, hidden=32, heads=8, kv_heads=kv_heads, vocab=10)
    layout = Layout.fill(tp, tp=tp)
    (k,) = [p for p in parameters(model) if p.name == "layers.0.attention.k.weight"]
    boxes = [local_box(k, model, layout, Place(tp=rank)) for rank in range(tp)]
    assert [(offset[0], size[0]) for offset, size in boxes] == rows
    assert all((offset[1], size[1]) == (0, 32) for offset, size in boxes)
    assert kv_copies(model, layout) == max(1, tp // kv_heads)
    assert partial_over(k, model, layout) == ("kv" if tp > kv_heads else "")


def test_a_vocabulary_that_does_not_divide_is_padded():
    model = Model.of("x", layers=1, hidden=32, heads=8, vocab=10)
    table = next(iter(parameters(model)))
    layout = Layout.fill(8, tp=8)
    assert local_shape(table, model, layout) == (2, 32)
    rows = [local_box(table, model, layout, Place(tp=rank)) for rank in range(8)]
    assert [size[0] for _, size in rows] == [2, 2, 2, 2, 2, 0, 0, 0]
    assert [offset[0] for offset, _ in rows] == [0, 2, 4, 6, 8, 10, 10, 10]


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_gradients_that_are_partial(sequence_parallel):
    model = Model.of("x", layers=1, hidden=32, heads=8, vocab=16, qk_norm="head", o_bias=True)
    layout = Layout.fill(4, tp=4, sequence_parallel=sequence_parallel)
    partial = {p.name for p in parameters(model) if partial_over(p, model, layout) == "tp"}
    heads = {"layers.0.attention.q_norm.weight", "layers.0.attention.k_norm.weight"}
    norms = {
        "layers.0.attention_norm.weight",
        "layers.0.mlp_norm.weight",
        "head.norm.weight",
        "layers.0.attention.o.bias",
    }
    assert partial == (heads | norms if sequence_parallel else heads)


def test_names_are_unique_and_a_tied_table_counts_once():
    for name in presets.model_names():
        model = replace(presets.model(name), layers=2)
        names = [p.name for p in parameters(model)]
        assert len(names) == len(set(names))
        other = replace(model, tied=not model.tied)
        difference = parameter_count(other) - parameter_count(model)
        assert abs(difference) == model.vocab * model.hidden


# ------------------------------------------------------------------------------------------
# Strict building


def test_values_of_flags_and_files_become_fields():
    findings = []
    told = {"tp": "4", "sequence-parallel": "false", "stages": "3,2", "zero": 2.0, "cp_method": "x"}
    assert check_fields(Layout, told, "layout", findings) == {
        "tp": 4,
        "sequence_parallel": False,
        "stages": (3, 2),
        "zero": 2,
        "cp_method": "x",
    }
    assert check_fields(Layout, {"stages": [1, 2]}, "", findings) == {"stages": (1, 2)}
    assert check_fields(Layout, {"stages": "none"}, "", findings) == {"stages": None}
    assert check_fields(Train, {"seq_len": None, "eps": "1e-6"}, "", findings) == {
        "seq_len": None,
        "eps": 1e-6,
    }
    moe = check_fields(Model, {"moe": {"experts": 4, "topk": 1, "ffn": 2}}, "", findings)
    assert moe == {"moe": MoE(4, 1, 2)}
    peak = check_fields(Cluster, {"peak_flops": {"float16": 3}}, "", findings)
    assert peak == {"peak_flops": {"float16": 3.0}}
    assert not findings


def test_all_wrong_keys_and_values_at_once():
    findings = []
    told = {"ttp": 3, "micro-batchh": 1, "pp": "two", "zero": True, "xyzzy": 0, "cp": 1.5, "ep": 2}
    assert check_fields(Layout, told, "layout", findings) == {"ep": 2}
    by_where = {f.where: f for f in findings}
    assert by_where.keys() == {
        "layout.ttp",
        "layout.micro_batchh",
        "layout.pp",
        "layout.zero",
        "layout.xyzzy",
        "layout.cp",
    }
    assert by_where["layout.ttp"].nearest == "layout.tp"
    assert by_where["layout.micro_batchh"].nearest == "layout.micro_batch"
    assert by_where["layout.xyzzy"].nearest is None
    assert by_where["layout.pp"].message == "'two' is not a whole number"


@dataclass(frozen=True)
class Every:
    """A field of every kind."""

    a: int = 0
    b: float = 0.0
    c: bool = False
    d: str = ""
    e: tuple[int, ...] = ()
    f: int | None = None
    g: MoE | None = None
    h: dict[str, float] | None = None


nonsense = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from("abcdefghij"), nonsense))
def test_nonsense_is_a_finding_and_no_traceback(told):
    findings = []
    values = check_fields(Every, told, "", findings)
    built = Every(**values)
    assert type(built.a) is int
    assert type(built.b) is float
    assert type(built.c) is bool
    assert type(built.d) is str
    assert all(type(n) is int for n in built.e)
    assert built.g is None or isinstance(built.g, MoE)
    assert {f.where.partition(".")[0] for f in findings} | values.keys() == told.keys()


def test_experts_tile_over_their_own_grid():
    """Each element of an expert is on one rank of ep x etp; a bias that every rank adds, on each
    of etp."""
    moe = MoE(experts=8, topk=2, ffn=12, bias=True)
    model = Model.of("small", layers=1, hidden=6, heads=2, vocab=8, moe=moe)
    layout = Layout.fill(8, ep=4, etp=2, tp=2, sequence_parallel=True)
    for p in (p for p in parameters(model) if p.expert):
        held = dict.fromkeys(product(*map(range, p.shape)), 0)
        for etp, ep in product(range(2), range(4)):
            offset, size = local_box(p, model, layout, Place(etp=etp, ep=ep))
            for at in product(*(range(o, o + n) for o, n in zip(offset, size, strict=True))):
                held[at] += 1
        assert set(held.values()) == {tp_copies(p, model, layout)}, p.name
