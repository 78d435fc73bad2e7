"""The page of a report: it stands alone, and says what the report says."""

import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from grids import PARTS, expert_traffic_grid, traffic_grid
from pages import parsed
from plait.cli.main import main
from plait.cost.ledger import MEMORY_CLASSES
from plait.report.build import report
from plait.report.facts import axes_used, flags
from plait.report.html import page
from plait.report.numbers import amount
from plait.report.timeline import IN_A_PAGE, drawn
from plait.rules import check
from plait.spec.findings import error
from plait.spec.jobfile import read_job

SMALL = {"model": "llama3.1-8b", "seq_len": 2048}
MIXTURE = {"model": "mixtral-8x7b", "seq_len": 2048}
CASES = {
    "one": SMALL | {"gpus": "h100:1"},
    "dense": SMALL | {"gpus": "h100:16", "tp": 4},
    "pipeline": SMALL | {"gpus": "h100:32", "tp": 2, "pp": 4, "accumulation": 8},
    "interleaved": SMALL | {"gpus": "h100:16", "pp": 4, "vpp": 2, "accumulation": 8},
    "hsdp": SMALL | {"gpus": "h100:32", "zero": 3, "dp_replicate": 2, "tp": 2},
    "context": SMALL | {"gpus": "h100:16", "cp": 4, "ulysses": 2, "tp": 2},
    "experts": MIXTURE | {"gpus": "h100:64", "tp": 2, "pp": 2, "ep": 8, "dp_replicate": 2},
    "odd": SMALL | {"gpus": "h100:12", "zero": 1},
    "large": {"model": "llama3.1-405b", "gpus": "h100:16384", "tp": 8, "pp": 16,
              "seq_len": 8192, "global_batch": 16384},
}  # fmt: skip


def plan(model, gpus=None, ranks=None, **given):
    return read_job("plan", model=model, gpus=gpus, ranks=ranks, overrides=given)


def answer(**given):
    job = plan(**given)
    return job, report(job, check(job, "plan"))


def drawing(job):
    return drawn(job) if job.layout.pp > 1 else None


@pytest.fixture(scope="module", params=CASES)
def case(request):
    """(job, REPORT, the page, the page parsed)."""
    job, said = answer(**CASES[request.param])
    assert all(f["level"] != "error" for f in said["findings"])
    text = page(said, drawing(job))
    return job, said, text, parsed(text)


# ------------------------------------------------------------------------------------------
# One file


def test_the_page_needs_nothing_from_elsewhere(case):
    *_, text, tree = case
    assert text.startswith("<!doctype html>")
    assert len(text.encode()) < 1_000_000
    loading = {"src", "href", "xlink:href", "srcset", "action", "data", "poster", "background"}
    for node in tree.all():
        assert loading.isdisjoint(node.attributes), node.name
        assert node.name not in {"link", "iframe", "object", "embed", "img", "base"}
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|\bimport\(|\bfetch\(|XMLHttpRequest|WebSocket", text)
    policy = next(tree.all("meta", http_equiv="Content-Security-Policy"))
    assert "default-src 'none'" in policy.attributes["content"]


def test_the_page_is_for_everyone(case):
    *_, tree = case
    assert next(tree.all("html")).attributes["lang"]
    ids = Counter(node.attributes["id"] for node in tree.all() if "id" in node.attributes)
    assert set(ids.values()) <= {1}
    for section in tree.all("section"):
        assert section.attributes["aria-label"]
    for bar in tree.all("div", class_="bar"):
        assert bar.attributes["role"] == "img"
        assert bar.attributes["aria-label"]
    for node in tree.all("div", class_="scroll"):
        # What scrolls must be reached by the keyboard.
        reached = [node, *node.all()]
        assert any(inner.attributes.get("tabindex") == "0" for inner in reached)
    for grid in tree.all("table", class_="grid"):
        cells = [c for c in grid.all("td") if "data-rank" in c.attributes]
        assert [c.attributes["tabindex"] for c in cells].count("0") == 1


def test_the_same_page_for_light_and_dark_and_paper(case):
    *_, text, _ = case
    for media in ("prefers-color-scheme: dark", "@media print {"):
        assert media in text


def test_what_a_person_names_is_no_markup():
    evil = "</script><script>alert(1)</script><b>&\"'"
    _, said = answer(**CASES["dense"])
    said["model"] = said["model"] | {"name": evil}
    said["cluster"] = said["cluster"] | {"device": evil}
    said["findings"] = [
        {"level": "warning", "rule": "evil", "message": evil, "where": evil, "value": evil,
         "suggest": {evil: evil}},
    ]  # fmt: skip
    tree = parsed(page(said))
    assert "alert(1)" not in "".join(s.text for s in tree.all("script"))
    assert len(list(tree.all("script"))) == 2
    finding = next(tree.all("ul", class_="findings"))
    assert finding.text.count(evil) == 4
    assert evil in next(tree.all("h1")).text


# ------------------------------------------------------------------------------------------
# Ranks


def cells(tree, grid):
    table = next(tree.all("table", data_grid=grid))
    return [c for c in table.all("td") if "data-rank" in c.attributes]


def test_every_rank_of_a_small_world_is_drawn_once_and_of_a_large_one_some(case):
    _, said, _, tree = case
    grids = [table.attributes["data-grid"] for table in tree.all("table", class_="grid")]
    wanted = ["dense"] * (said["world"] > 1) + ["expert"] * bool(said["model"]["moe"])
    assert grids == wanted
    for grid in grids:
        ranks = [int(c.attributes["data-rank"]) for c in cells(tree, grid)]
        assert ranks == sorted(set(ranks))
        if said["world"] <= 64:
            assert ranks == list(range(said["world"]))
        else:
            assert len(ranks) <= 600
            assert {0, said["world"] - 1} <= set(ranks)


def test_what_is_left_out_of_a_large_world_is_said():
    _, said = answer(**CASES["large"])
    tree = parsed(page(said))
    gaps = [row.text for row in next(tree.all("table", class_="grid")).all("tr", class_="gap")]
    # tp 8 and dp_shard 128 below pp 16: a stage is 1024 ranks, a group of tp 8.
    assert "⋮ pp 3-14 likewise, 1024 ranks apart" in gaps
    assert "⋮ dp_shard 3-126 likewise, 8 ranks apart" in gaps


def coordinate(sizes, rank):
    """Axis -> position, by the grid's own definition: the first axis varies fastest."""
    here = {}
    for axis, size in sizes.items():
        rank, here[axis] = divmod(rank, size)
    return here


def test_rows_and_columns_are_named_by_their_coordinates(case):
    _, said, _, tree = case
    for table in tree.all("table", class_="grid"):
        sizes = said["grids"][table.attributes["data-grid"]]
        heads = [[n.text for n in row.content] for row in next(table.all("thead")).all("tr")]
        for row in next(table.all("tbody")).all("tr"):
            cells = [c for c in row.all("td") if "data-rank" in c.attributes]
            for column, cell in enumerate(cells):
                here = coordinate(sizes, int(cell.attributes["data-rank"]))
                named = set()
                for axis, *positions in heads:
                    # Of an axis that does not fit a row: its position within the row's part.
                    assert int(positions[column]) == here[axis] % len(set(positions))
                    if len(set(positions)) == sizes[axis]:
                        named.add(axis)
                for words in next(row.all("th")).text.split(", "):
                    axis, _, positions = words.partition(" ")
                    if axis == "rank":
                        continue
                    first, _, last = positions.partition("-")
                    assert int(first) <= here[axis] <= int(last or first)
                    named.add(axis)
                assert named == {axis for axis, size in sizes.items() if size > 1}


def test_every_rank_sends_what_the_report_says(case):
    _, said, _, tree = case
    tables = {
        int(stage): table
        for table in tree.all("table", class_="sent")
        for stage in table.attributes["data-stages"].split()
    }
    if said["world"] == 1:
        assert tables == {}
        return
    assert sorted(tables) == list(range(said["layout"]["pp"]))
    each = said["world"] // said["layout"]["pp"]
    wanted = {stage: {"bytes": Counter(), "wire": Counter()} for stage in tables}
    for row in said["traffic"]:
        wanted[row["stage"]]["bytes"][row["axis"]] += row["bytes"]
        wanted[row["stage"]]["wire"][row["axis"]] += row["wire_bytes"]
    for stage, table in tables.items():
        for key, sums in wanted[stage].items():
            shown = {
                row.attributes["data-axis"]: int(row.attributes[f"data-{key}"])
                for row in table.all("tr")
                if "data-axis" in row.attributes
            }
            assert {axis: n for axis, n in shown.items() if n} == dict(sums)
    for table in tree.all("table", class_="grid"):
        for cell in cells(tree, table.attributes["data-grid"]):
            rank, wire = (int(cell.attributes[k]) for k in ("data-rank", "data-wire"))
            assert wire == sum(wanted[rank // each]["wire"].values())


def test_groups_are_those_of_the_grid(case):
    job, said, _, _ = case
    dense, expert = traffic_grid(job.layout), expert_traffic_grid(job.layout)
    seen = {axis.name for axis in axes_used(said)}
    assert {row["axis"] for row in said["traffic"]} <= seen
    world = said["world"]
    for axis in axes_used(said):
        grid = expert if axis.name in ("etp", "ep", "edp") else dense
        for rank in {0, 1, 5, world // 2, world - 1} & set(range(world)):
            group = grid.group(rank, *PARTS.get(axis.name, (axis.name,)))
            assert list(axis.group(rank)) == sorted(group), (axis, rank)


# ------------------------------------------------------------------------------------------
# Memory, traffic, pipeline


def width(node):
    return float(re.search(r"width:([\d.]+)%", node.attributes["style"])[1])


def test_memory_bars_are_to_the_scale_of_the_device(case):
    _, said, _, tree = case
    held = said["memory"]
    bars = [b for b in next(tree.all("div", class_="bars")).all("div", class_="bar")]
    labels = [bar.attributes["aria-label"] for bar in bars]
    for label in labels:  # one stage, or several that are alike
        assert re.match(r"stage \d+, |stages \d+[-,]", label), label
    besides = {"reserved": held["reserved_bytes"], "context": held["context_bytes"]}
    scale = max(held["device_bytes"], held["peak_bytes"] + sum(besides.values()))
    for row in held["by_stage"]:
        total = row["total"] + sum(besides.values())
        wanted = {name: row[name] for name in MEMORY_CLASSES} | besides
        parts = {f"m-{name}": size / scale * 100 for name, size in wanted.items() if size}
        found = [
            {part.attributes["class"]: width(part) for part in bar.all("i")}
            for bar, label in zip(bars, labels, strict=True)
            if f"{row['moment']}: " in label and amount(total) in label
        ]
        assert any(shown == pytest.approx(parts, abs=0.001) for shown in found), row
        limit = next(next(tree.all("div", class_="bars")).all("b", class_="limit"))
        end = float(re.search(r"left:([\d.]+)%", limit.attributes["style"])[1])
        assert end == pytest.approx(held["device_bytes"] / scale * 100, abs=0.001)


def test_without_a_cluster_there_is_no_device_to_fill():
    job = plan(model="llama3.1-8b", ranks=4, seq_len=512)
    tree = parsed(page(report(job, [])))
    assert not list(tree.all("b", class_="limit"))
    assert not list(tree.all("i", class_="m-reserved"))
    assert not list(tree.all("span", class_="link"))


def test_traffic_is_there_entry_by_entry(case):
    _, said, _, tree = case
    section = next(tree.all("section", aria_label="Traffic"))
    shown = Counter()
    for row in section.all("tr"):
        words = [node.text for node in row.content]
        if words[0] == "axis":
            continue
        axis, collective, phase, dtype, stages, count, total, wire, links = words
        for span in stages.split(", "):
            first, _, last = span.partition("-")
            for stage in range(int(first), int(last or first) + 1):
                shown[axis, collective, phase, dtype, stage, count, total, wire, links] += 1
    assert shown == Counter(
        (
            row["axis"], row["collective"], row["phase"], row["dtype"], row["stage"],
            f"{row['count']:,}", amount(row["bytes"]), amount(row["wire_bytes"]),
            "slow" if row["inter_node"] else "fast",
        )
        for row in said["traffic"]
    )  # fmt: skip


def test_the_pipeline_is_drawn(case):
    job, said, _, tree = case
    drawings = list(tree.all("svg"))
    assert len(drawings) == (job.layout.pp > 1)
    if drawings:
        timeline = drawing(job)
        actions = sum(map(len, timeline.table.ranks))
        titles = [t.text for t in drawings[0].all("title")]
        assert len(titles) == actions + 1  # and that of the whole
        assert f"{said['bubble']['step_total']:.1%} of the step" in tree.text


def test_a_long_step_is_drawn_with_fewer_micro_batches_and_says_so():
    job, said = answer(**SMALL, gpus="h100:8", pp=4, accumulation=1000)
    timeline = drawn(job)
    assert sum(map(len, timeline.table.ranks)) <= IN_A_PAGE
    text = page(said, timeline)
    assert f"Drawn with {timeline.table.micro_batches} of its 1000 micro batches" in text
    assert drawn(job, 10**9).table.micro_batches == 1000


def test_a_step_is_not_drawn_with_so_few_micro_batches_that_it_is_another():
    """At least as many as stages, or no rank would do what it does for most of the step."""
    job, said = answer(model="llama3.1-405b", gpus="h100:63", pp=63, accumulation=126)
    assert drawn(job, 63 * 126).table.micro_batches == 63
    assert drawn(job) is None
    assert "too many actions" in page(said, None)


def test_a_table_in_a_file_is_drawn_whole_or_not_at_all(tmp_path):
    file = tmp_path / "table.csv"
    assert main(["schedule", "1f1b", "--pp", "2", "--microbatches", "8", "--csv", str(file)]) == 0
    job, said = answer(**SMALL, gpus="h100:2", pp=2, accumulation=8, schedule=str(file))
    assert drawn(job, 32).table.micro_batches == 8
    assert drawn(job, 31) is None
    assert "plait schedule draws it" in page(said, None)


# ------------------------------------------------------------------------------------------
# The answer


def test_the_flags_ask_the_same_question(case):
    _, said, _, tree = case
    copied = next(tree.all("code", id="flags")).text
    assert copied == " ".join(flags(said))
    words = shlex.split(copied)
    given = dict(zip([w.removeprefix("--") for w in words[::2]], words[1::2], strict=True))
    given = {name.replace("-", "_"): text for name, text in given.items()}
    again = plan(model=said["model"]["name"], gpus=said["cluster"]["name"], **given)
    said_again = report(again, check(again, "plan"))
    for key in ("layout", "grids", "batch", "memory", "traffic"):
        assert said_again[key] == said[key]


def test_the_verdict(case):
    _, said, _, tree = case
    verdict = next(tree.all("section", class_="verdict"))
    assert ("Fits." in verdict.text) == said["fits"]
    assert ("Does not fit." in verdict.text) == (not said["fits"])
    held = said["memory"]
    used = held["peak_bytes"] + held["reserved_bytes"] + held["context_bytes"]
    assert amount(used) in verdict.text


def test_findings_with_what_would_be_better(case):
    _, said, _, tree = case
    shown = [item.text for node in tree.all("ul", class_="findings") for item in node.all("li")]
    assert len(shown) == len(said["findings"])
    for item, finding in zip(shown, said["findings"], strict=True):
        assert f"{finding['level']}: {finding['rule']}" in item
        assert finding["message"] in item
        for key, value in finding["suggest"].items():
            assert f"{key} {value}" in item


def test_an_illegal_layout_shows_its_findings():
    job = plan(**CASES["experts"])
    said = report(job, [error("layout.ep", 8, "eight is not to be", 4)])
    tree = parsed(page(said))
    assert "Illegal." in next(tree.all("section", class_="verdict")).text
    assert "eight is not to be" in next(tree.all("ul", class_="findings")).text
    labels = [section.attributes["aria-label"] for section in tree.all("section")]
    assert labels == ["Answer", "Findings", "What was asked", "Ranks"]
    assert not [n for n in tree.all("tr") if "data-wire" in n.attributes]


def test_a_dry_run_shows_measured_beside_predicted():
    _, said = answer(**CASES["pipeline"])
    memory = [dict(row) for row in said["memory"]["by_stage"]]
    memory[0]["total"] = memory[0]["total"] * 100 // 101
    measured = {"measured": {"traffic": said["traffic"], "memory": memory}, "agree": True,
                "differences": []}  # fmt: skip
    section = next(parsed(page(said | measured)).all("section", aria_label="Measured"))
    assert "Agrees" in section.text
    rows = [[node.text for node in row.content] for row in section.all("tr")][1:]
    assert len(rows) == len(memory)
    assert rows[0][-1] == "+1.00%"
    assert {row[-1] for row in rows[1:]} == {"+0.00%"}
    off = measured | {"agree": False, "differences": ["stage 0: <sends> nothing"]}
    section = next(parsed(page(said | off)).all("section", aria_label="Measured"))
    assert "Agrees" not in section.text
    assert "stage 0: <sends> nothing" in section.text


# ------------------------------------------------------------------------------------------
# The command


@pytest.fixture
def ask(capsys, tmp_path, monkeypatch):
    """Runs plait in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*argv):
        code = main([str(word) for word in argv])
        return code, *capsys.readouterr()

    return run


EXPLAIN = ("explain", "llama3.1-8b", "--gpus", "h100:16", "--tp", "2", "--pp", "2",
           "--accumulation", "4", "--seq-len", "2048")  # fmt: skip


def test_the_answer_goes_to_the_page_too(ask):
    code, out, err = ask(*EXPLAIN)
    assert (code, err) == (0, "")
    assert ask(*EXPLAIN, "--html", "a.html") == (0, out, "")
    code, out, err = ask(*EXPLAIN, "--html=b.html", "--json")
    assert (code, err) == (0, "")
    said = json.loads(out)
    job = plan(**SMALL, gpus="h100:16", tp=2, pp=2, accumulation=4)
    wanted = page(said, drawing(job))
    assert Path("a.html").read_text("utf-8") == Path("b.html").read_text("utf-8") == wanted


def test_a_dry_run_writes_a_page(ask):
    argv = ("dryrun", "tiny", "--gpus", "h100:4", "--tp", "2", "--seq-len", "64")
    code, out, _ = ask(*argv, "--html", "a.html", "--json")
    assert (code, json.loads(out)["agree"]) == (0, True)
    tree = parsed(Path("a.html").read_text("utf-8"))
    assert "Agrees" in next(tree.all("section", aria_label="Measured")).text


def test_an_illegal_layout_has_a_page(ask):
    code, _, _ = ask("explain", "llama3.1-8b", "--gpus", "h100:16", "--tp", "2", "--dcp", "2",
                     "--html", "a.html")  # fmt: skip
    assert code == 1
    assert "Illegal." in Path("a.html").read_text("utf-8")


@pytest.mark.parametrize("path", ["none/a.html", ".", "", "/dev/null", "n" * 300])
def test_a_page_that_cannot_be_written_is_one_line(ask, tmp_path, path):
    code, out, err = ask(*EXPLAIN, f"--html={path}")
    assert (code, out) == (2, "")
    assert err.startswith("html: ")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_all_problems_at_once(ask):
    code, out, err = ask(*EXPLAIN[:4], "--tp", "3", "--html", "none/a.html")
    assert (code, out) == (2, "")
    assert {"html", "layout.tp"} <= {line.partition(":")[0] for line in err.splitlines()}


def test_a_page_that_breaks_off_leaves_the_old_one(ask, tmp_path, monkeypatch):
    Path("a.html").write_text("old")

    def full(path, text, encoding):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert ask(*EXPLAIN, "--html", "a.html") == (2, "", "html: No space left on device\n")
    assert Path("a.html").read_bytes() == b"old"
    assert [f.name for f in tmp_path.iterdir()] == ["a.html"]


def test_no_torch():
    code = (
        "import sys, plait.report.html, plait.report.timeline\n"
        "sys.exit(bool({'torch', 'rich', 'numpy'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
