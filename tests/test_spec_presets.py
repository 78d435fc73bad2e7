"""Presets: what is published about them, and every way to name them wrongly."""

import json

import pytest

from plait.spec import presets
from plait.spec.findings import UserError
from plait.spec.parameters import active_count, parameter_count

#: Exact parameter counts of published checkpoints.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,
    "kimi-k2": 1_026_408_232_448,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "glm-4.5": 352_797_829_024,
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "olmo2-32b": 32_234_279_936,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "bloom-176b": 176_247_271_424,
}

#: Where only a rounded count is published: counts from the published sizes, by other hands.
FROM_SIZES = {
    "gpt3-175b": 174_604_259_328,
    "megatron-gpt-22b": 22_074_273_792,
    "megatron-gpt-175b": 174_615_846_912,
    "megatron-gpt-530b": 529_600_819_200,
    "megatron-gpt-1t": 1_008_038_758_400,
    "sc21-gpt-1.7b": 1_652_230_656,
    "sc21-gpt-3.6b": 3_562_168_320,
    "sc21-gpt-7.5b": 7_467_786_240,
    "sc21-gpt-18.4b": 18_449_756_160,
    "sc21-gpt-39.1b": 39_096_041_472,
    "sc21-gpt-76.1b": 76_050_739_200,
    "sc21-gpt-145.6b": 145_622_261_760,
    "sc21-gpt-310.1b": 310_130_540_544,
    "sc21-gpt-529.6b": 529_600_819_200,
    "sc21-gpt-1008b": 1_008_038_758_400,
    "llama4-scout": 107_769_861_120,
    "llama4-maverick": 400_711_848_960,
    "qwen3-coder-480b-a35b": 480_154_875_392,
    "deepseek-llm-67b": 67_425_001_472,
    "glm-4.5-air": 106_852_251_264,
    "gemma3-4b": 3_880_099_328,
    "gemma3-12b": 11_765_788_416,
    "gemma3-27b": 27_009_002_240,
    "mingpt-175b": 175_215_501_312,
}

#: Parameters that one token uses, with both tables and without the input table.
ACTIVE = {
    "llama4-scout": (17_172_894_720, 16_138_408_960),
    "llama4-maverick": (17_184_691_200, 16_150_205_440),
    "mixtral-8x7b": (12_879_925_248, 12_748_853_248),
    "mixtral-8x22b": (39_161_468_928, 38_960_142_336),
    "qwen3-30b-a3b": (3_353_032_704, 3_041_867_776),
    "qwen3-235b-a22b": (22_190_763_520, 21_568_433_664),
    "qwen3-coder-480b-a35b": (35_474_765_312, 34_541_270_528),
    "deepseek-v2-lite": (2_661_150_208, 2_451_435_008),
    "deepseek-v2": (21_375_800_320, 20_851_512_320),
    "deepseek-v3": (37_552_297_472, 36_625_618_432),
    "kimi-k2": (32_861_500_928, 31_687_095_808),
    "gpt-oss-20b": (4_187_440_704, 3_608_307_264),
    "gpt-oss-120b": (5_711_982_912, 5_132_849_472),
    "glm-4.5": (33_632_266_144, 32_856_319_904),
    "glm-4.5-air": (13_424_129_664, 12_803_372_672),
}


@pytest.mark.parametrize(("name", "count"), (PUBLISHED | FROM_SIZES).items())
def test_parameter_counts(name, count):
    assert parameter_count(presets.model(name)) == count


@pytest.mark.parametrize(("name", "counts"), ACTIVE.items())
def test_active_counts(name, counts):
    model = presets.model(name)
    assert (active_count(model), active_count(model, input_table=False)) == counts


def test_published_counts_are_told():
    told = {name: presets.published_parameters(name) for name in presets.model_names()}
    same = PUBLISHED | {"llama3.3-70b": PUBLISHED["llama3.1-70b"]}
    assert {name: count for name, count in told.items() if count} == same


def test_every_preset_is_sound():
    for name in presets.model_names():
        model = presets.model(name)
        assert model.name == name == name.lower()
        assert model.heads % model.kv_heads == 0
        assert model.seq > 0


def test_small_presets_are_small():
    for name in ("tiny", "tiny-moe", "tiny-mla"):
        assert parameter_count(presets.model(name)) < 20e6


def test_tiny():
    tiny = presets.model("tiny")
    sizes = (tiny.layers, tiny.hidden, tiny.heads, tiny.kv_heads, tiny.ffn, tiny.vocab, tiny.seq)
    assert sizes == (4, 256, 8, 4, 768, 256, 256)
    assert [presets.model("tiny-moe").is_moe(i) for i in range(4)] == [False, True, True, True]


def test_names_in_any_case():
    assert presets.model("Llama3.1-8B") == presets.model("llama3.1-8b")
    assert presets.cluster(" H100:064 ") == presets.cluster("h100:64")
    assert presets.cluster("A100-80GB:8") == presets.cluster("a100:8")


def refused(call, *args):
    with pytest.raises(UserError) as caught:
        call(*args)
    lines = [finding.line() for finding in caught.value.findings]
    assert all("\n" not in line for line in lines)
    return caught.value.findings


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("lama3.1-8b", "llama3.1-8b"),
        ("mixtral-8x7", "mixtral-8x7b"),
        ("deepseekv3", "deepseek-v3"),
        ("qwen2.5_7b", "qwen2.5-7b"),
        ("gpt3-175", "gpt3-175b"),
    ],
)
def test_unknown_model(wrong, right):
    (finding,) = refused(presets.model, wrong)
    assert finding.nearest == right
    assert wrong in finding.message


@pytest.mark.parametrize("name", ["", "a" * 5000, "no/such/folder", "x.json", "\0", "zzzzzz"])
def test_nonsense_for_a_model(name):
    assert len(refused(presets.model, name)) == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[1]", "list"),
        (b"\xff\xfe", "UTF-8"),
        (b"[" * 100_000, "not valid JSON"),
        (b"{}", "model_type None"),
        (b'{"model_type": "lama"}', "'lama'"),
    ],
)
def test_broken_config(tmp_path, content, says):
    (tmp_path / "config.json").write_bytes(content)
    for path in (tmp_path, tmp_path / "config.json"):
        (finding,) = refused(presets.model, str(path))
        assert says in finding.message


def test_folder_without_a_config(tmp_path):
    (finding,) = refused(presets.model, str(tmp_path))
    assert "config.json" in finding.message


def test_clusters():
    gb200 = presets.cluster("gb200:72")
    assert (gb200.devices, gb200.node, gb200.fast_domain) == (72, 4, 72)
    h100 = presets.cluster("h100:64")
    assert (h100.name, h100.devices, h100.node, h100.fast_domain) == ("h100:64", 64, 8, 8)
    assert (h100.memory, h100.memory_bandwidth) == (80 * 10**9, 3.35e12)
    assert h100.peak_flops == {"bfloat16": 989e12, "float16": 989e12, "float8": 1979e12}
    assert (h100.link, h100.nic) == (450e9, 50e9)
    assert [h100.bandwidth(size) for size in (2, 8)] == [450e9, 450e9]
    mesh = presets.cluster("mi300x:8")  # a link of 64 GB/s to each of seven others
    assert [mesh.bandwidth(size) for size in (2, 4, 8)] == [64e9, 192e9, 448e9]
    assert presets.cluster("tpu-v5e:256").fast_domain == 256  # a slice, not its host's 8
    assert presets.cluster("a100-40gb:8").memory == 40 * 10**9
    for name in presets.cluster_names():
        assert presets.cluster(f"{name}:16").devices == 16


@pytest.mark.parametrize(
    ("wrong", "right", "problems"),
    [
        ("h101:64", "h100:64", 1),
        ("h100:0", "h100:8", 1),
        ("h100:-8", "h100:8", 1),
        ("h100:6.5", "h100:8", 1),
        ("h100:", "h100:8", 1),
        ("h100", "h100:8", 1),
        ("h1oo:eight", "h100:8", 2),
        ("mi30x:16", "mi300x:16", 1),
        ("h100:99999999999999999999", "h100:1000000", 1),
    ],
)
def test_wrong_cluster(wrong, right, problems):
    findings = refused(presets.cluster, wrong)
    assert len(findings) == problems
    assert {finding.nearest for finding in findings} == {right}


@pytest.mark.parametrize("text", ["", ":", ":8", "no/such.toml", "no.json", "🂡:4"])
def test_nonsense_for_a_cluster(text):
    refused(presets.cluster, text)


CLUSTER = {
    "device": "A card",
    "devices": 6,
    "node": 3,
    "fast_domain": 3,
    "memory": 10**10,
    "memory_bandwidth": 1e12,
    "peak_flops": {"bfloat16": 100e12},
    "link": 25e9,
}


def test_cluster_file(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(CLUSTER))
    cluster = presets.cluster(str(path))
    assert (cluster.name, cluster.devices, cluster.nic) == ("mine", 6, None)
    path = tmp_path / "mine.toml"
    lines = (f"{k} = {json.dumps(v)}" for k, v in CLUSTER.items() if k != "peak_flops")
    path.write_text("\n".join(lines) + "\n[peak_flops]\nbfloat16 = 100e12\n")
    assert presets.cluster(str(path)) == cluster


@pytest.mark.parametrize("peaks", [{"bf16": 1e15}, {"bfloat16": -1.0}, {"bfloat16": 1e999}])
def test_peaks_of_a_cluster_file_are_looked_at(tmp_path, peaks):
    said = {"device": "x", "devices": 8, "node": 8, "fast_domain": 8, "memory": 80e9}
    said |= {"memory_bandwidth": 2e12, "link": 3e11, "nic": 5e10, "peak_flops": peaks}
    (tmp_path / "c.json").write_text(json.dumps(said))
    with pytest.raises(UserError) as caught:
        presets.cluster(str(tmp_path / "c.json"))
    assert [f for f in caught.value.findings if "peak_flops" in f.where]


def test_broken_cluster_file_all_at_once(tmp_path):
    path = tmp_path / "mine.json"
    broken = CLUSTER | {"node": 0, "memorry": 3, "peak_flops": {"bfloat16": "fast"}, "link": "x"}
    path.write_text(json.dumps({k: v for k, v in broken.items() if k != "devices"}))
    wheres = {f.where.removeprefix(f"{path}.") for f in refused(presets.cluster, str(path))}
    assert wheres == {"node", "memorry", "peak_flops.bfloat16", "link", "devices"}


def test_a_peak_that_is_none_is_named(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(CLUSTER | {"peak_flops": {"bfloat16": None, "float16": 1e14}}))
    (found,) = refused(presets.cluster, str(path))
    assert found.line() == f"{path}.peak_flops.bfloat16: None is not a number"
