"""`plait schedule`: what it answers, what it refuses, what it writes."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from plait.cli.main import main
from plait.schedules.check import check
from plait.schedules.csvfile import read_table
from plait.spec.schedule import SCHEDULES


@pytest.fixture
def ask(capsys, monkeypatch, tmp_path):
    """Runs `plait schedule ...` in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PLAIT_DEBUG", raising=False)

    def run(*argv):
        code = main(["schedule", *map(str, argv)])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def answer(ask):
    """The JSON of a question that is answered."""

    def run(*argv):
        code, out, err = ask(*argv, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return run


@pytest.fixture
def refused(ask, tmp_path):
    """where -> nearest of a question that is wrong; nothing may have been written."""

    def run(*argv):
        before = sorted(tmp_path.iterdir())
        code, out, err = ask(*argv, "--json")
        assert (code, err) == (2, "")
        errors = json.loads(out)["errors"]
        assert all(e.keys() == {"where", "value", "message", "nearest"} for e in errors)
        code, out, err = ask(*argv)
        assert (code, out) == (2, "")
        assert len(err.splitlines()) == len(errors)
        assert sorted(tmp_path.iterdir()) == before
        return {e["where"]: e["nearest"] for e in errors}

    return run


# ------------------------------------------------------------------------------------------
# What it answers


@pytest.mark.parametrize(
    ("p", "m", "f", "b", "w"), [(4, 8, 1, 1, 1), (2, 7, 1, 2, 1), (5, 12, 0.5, 1.25, 0.75)]
)
def test_the_closed_forms_of_1f1b(answer, p, m, f, b, w):
    """Narayanan et al. 2104.04473, section 2.2: (m + p - 1)(F + B), rank r holds p - r."""
    said = answer("1f1b", "--pp", p, "--microbatches", m, "--f", f, "--b", b, "--w", w)
    ideal = m * (f + b + w)
    assert said["makespan"] == pytest.approx((m + p - 1) * (f + b + w))
    assert said["bubble"]["step_ideal"] == pytest.approx((p - 1) / m)
    assert said["bubble"]["step_total"] == pytest.approx((p - 1) / (m + p - 1))
    assert said["busy"] == pytest.approx([ideal] * p)
    assert said["peak_activations"] == [min(m, p - r) for r in range(p)]
    assert ideal <= said["lower_bound"] <= said["makespan"] * (1 + 1e-12)


def test_messages_take_time(answer):
    # One micro batch goes down two ranks and up again; the last rank's F and I are back to back.
    said = answer("1f1b", "--pp", 3, "--microbatches", 1, "--comm", 0.25)
    assert said["makespan"] == pytest.approx(3 * 1 + 3 * 2 + 4 * 0.25)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule(answer, name):
    said = answer(name, "--pp", 4, "--microbatches", 8)
    least, most = SCHEDULES[name].vpp
    assert said["schedule"] == name
    assert (said["pp"], said["microbatches"]) == (4, 8)
    assert least <= said["vpp"] <= most
    assert len(said["actions"]) == len(said["peak_activations"]) == len(said["busy"]) == 4
    # Each chunk's F, and B or W, once a micro batch.
    cells = [cell for rank in said["actions"] for cell in rank]
    assert len(cells) == len(set(cells))
    for kinds in ("F", "BI", "BW"):
        assert sum(any(k in c for k in kinds) for c in cells) == 4 * said["vpp"] * 8
    assert set(said["bubble"]) == {"step_total", "step_ideal", "span_total", "span_ideal"}
    # Eight micro batches, F = I = W = 1.
    assert said["busy"] == pytest.approx([24] * 4)
    assert 24 <= said["lower_bound"] <= said["makespan"] * (1 + 1e-9)


def test_the_shape_has_defaults(answer):
    said = answer("zbv")
    assert (said["pp"], said["vpp"], said["microbatches"]) == (4, 2, 8)
    assert answer("gpipe", "--pp", 3)["microbatches"] == 6
    assert answer("interleaved-1f1b")["vpp"] == 2


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("ScheduleZBVZeroBubble", "zbv"),
        ("V-Schedule", "zbv"),
        ("VPP", "interleaved-1f1b"),
        ("ZB", "zb-h1"),
        ("1F1B-interleaved", "interleaved-1f1b"),
    ],
)
def test_other_names(answer, said, meant):
    assert answer(said)["schedule"] == meant


def test_a_group_stands_in_the_name_or_beside_it(answer):
    argv = ("--pp", 2, "--microbatches", 8)
    named = answer("interleaved-1f1b:4", *argv)
    assert named == answer("interleaved-1f1b", "--group", 4, *argv)
    assert named["actions"] != answer("interleaved-1f1b", *argv)["actions"]
    # Four micro batches of chunk 0 before the first of chunk 2.
    assert named["actions"][0][:5] == ["0F0", "0F1", "0F2", "0F3", "2F0"]


def test_uneven_stages(answer):
    """Times a chunk are each chunk's own, one number is a share of a rank's."""
    said = answer("1f1b", "--pp", 2, "--microbatches", 3, "--f", "1,2", "--b", "0.5,1", "--w", 0.25)
    assert said["busy"] == pytest.approx([3 * 1.75, 3 * 3.25])
    said = answer("zbv", "--pp", 2, "--microbatches", 4, "--f", "1,2,3,4", "--b", 2, "--w", 0)
    # Rank 0 has chunks 0 and 3; with two chunks a rank each I takes half of 2.
    assert said["busy"] == pytest.approx([4 * (1 + 4 + 2), 4 * (2 + 3 + 2)])


def test_more_than_the_cap_is_no(ask):
    code, out, _ = ask("1f1b", "--cap", 2, "--json")
    said = json.loads(out)
    assert (code, said["within_cap"], said["cap"]) == (1, False, 2)
    code, out, _ = ask("1f1b", "--cap", 2)
    assert code == 1
    assert "rank 0" in out
    assert "Holds more than 2" in out
    code, out, _ = ask("1f1b", "--cap", 4, "--json")
    assert (code, json.loads(out)["within_cap"]) == (0, True)
    # A cap that nothing can keep leaves a bound that JSON can hold.
    assert "Infinity" not in ask("1f1b", "--cap", 0, "--json")[1]


@pytest.mark.parametrize(
    "argv",
    [
        ("--cap", 3, "--b", 1.4, "--w", 0.6, "--comm", 0.1),
        ("--f", "1,1,1,1.6"),
        ("--vpp", 2, "--cap", 4),
        ("--microbatches", 3),
    ],
)
def test_auto_is_not_worse_than_any_other(ask, answer, argv):
    best = answer("auto", *argv)
    assert best["makespan"] <= best["best_named"]["makespan"] * (1 + 1e-9)
    named = best["chosen"] in SCHEDULES
    assert named or best["chosen"] == "search"
    for name in SCHEDULES:
        code, out, _ = ask(name, *argv, "--json")
        if code == 0:  # it can be built, and keeps the cap
            twice = name == "dualpipe" and "--f" in argv
            assert twice or best["makespan"] <= json.loads(out)["makespan"] * (1 + 1e-9), name


def test_zb_auto_keeps_the_cap(answer):
    assert max(answer("zb-auto", "--cap", 2)["peak_activations"]) <= 2
    assert max(answer("zb-auto", "--cap", 7)["peak_activations"]) <= 7


def test_for_people(ask):
    code, out, err = ask("v-half", "--pp", 3, "--microbatches", 5)
    assert (code, err) == (0, "")
    for words in ("v-half", "3 ranks x 2 chunks", "5 micro batches", "makespan", "peak", "idle"):
        assert words in out.replace("\u00a0", " ")
    assert "\x1b" not in out  # this is no terminal
    assert sum(line.startswith("  rank ") for line in out.splitlines()) == 4  # a heading, 3 rows


# ------------------------------------------------------------------------------------------
# Files


def test_files(ask, answer, tmp_path):
    argv = ("zbv", "--svg", "a.svg", "--trace", "a.json", "--csv", "a.csv")
    code, out, _ = ask(*argv)
    assert code == 0
    assert all(f"{key} written to a." in out for key in ("svg", "trace", "csv"))
    assert {f.name for f in tmp_path.iterdir()} == {"a.svg", "a.json", "a.csv"}
    ElementTree.parse("a.svg")
    assert json.loads(Path("a.json").read_text())["traceEvents"]
    table = read_table("a.csv")
    assert check(table) == []
    # As readable as any other file.
    Path("other").touch()
    assert {f.stat().st_mode for f in tmp_path.iterdir()} == {Path("other").stat().st_mode}
    # The same schedule from its file.
    named, read = answer("zbv"), answer("a.csv")
    assert read.pop("schedule") == "a.csv"
    named.pop("schedule")
    assert read == named
    # What was there is replaced, also the file that was read.
    assert ask("a.csv", "--csv", "a.csv")[0] == 0
    assert read_table("a.csv") == table


def test_a_link_stays_a_link(ask):
    Path("real.svg").write_text("old")
    Path("link.svg").symlink_to("real.svg")
    assert ask("1f1b", "--svg", "link.svg")[0] == 0
    assert Path("link.svg").is_symlink()
    assert Path("real.svg").read_text().startswith("<svg")


def test_all_files_or_none(ask, monkeypatch, tmp_path):
    """What breaks while files are written leaves nothing behind."""
    Path("a.svg").write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("plait.cli.schedule.write_table", full)
    code, out, err = ask("1f1b", "--svg", "a.svg", "--trace", "t.json", "--csv", "b.csv")
    assert (code, out, err) == (2, "", "csv: No space left on device\n")
    assert Path("a.svg").read_text() == "old"
    assert [f.name for f in tmp_path.iterdir()] == ["a.svg"]


def test_files_that_cannot_be_written(refused):
    Path("folder").mkdir()
    argv = ("1f1b", "--svg", "none/a.svg", "--trace", "folder", "--csv", "")
    assert refused(*argv).keys() == {"svg", "trace", "csv"}
    assert refused("1f1b", "--svg", "/dev/null").keys() == {"svg"}
    assert refused("1f1b", "--svg", "a", "--csv", "./a").keys() == {"csv"}


# ------------------------------------------------------------------------------------------
# What it refuses


def test_all_problems_at_once(refused):
    argv = ("--pp", "x", "--microbatches", 0, "--vpp", -1, "--f", "nan", "--b", "1,-2", "--w", "")
    said = refused("zbbb", *argv, "--comm", "inf", "--cap", "lots", "--ppp", 3, "more")
    wheres = {"schedule", "pp", "microbatches", "vpp", "f", "b", "w", "comm", "cap", "more"}
    assert said.keys() == wheres | {"--ppp"}
    assert (said["microbatches"], said["vpp"], said["b"]) == (1, 1, 0)
    assert said["--ppp"] == "--pp"


@pytest.mark.parametrize(
    ("argv", "nearest"),
    [
        ((), {"schedule": None}),
        (("1f1bb",), {"schedule": "1f1b"}),
        (("zero-buble",), {"schedule": "zb-h1"}),
        (("zbv:4",), {"schedule": "zbv"}),
        (("interleaved-1f1b:0",), {"schedule": "interleaved-1f1b"}),
        (("interleaved-1f1b:4", "--group", 6), {"group": 4}),
        (("1f1b", "--group", 4), {"group": None}),
        (("zbv", "--vpp", 3), {"vpp": 2}),
        (("interleaved-1f1b", "--vpp", 1), {"vpp": 2}),
        (("dualpipe", "--microbatches", 7), {"microbatches": 8}),
        (("dualpipe", "--pp", 3, "--microbatches", 5), {"pp": 4, "microbatches": 8}),
        (("dualpipev", "--microbatches", 4), {"microbatches": 8}),
        (("1f1b", "--pp"), {"--pp": None}),
        (("1f1b", "--f"), {"--f": None}),
        (("1f1b", "--f", "1,2,3"), {"f": None}),
        (("1f1b", "--f", "0", "--b", 0, "--w", "0,0,0,0"), {"f": 1}),
        (("1f1b", "--f", "1e13"), {"f": 1e12}),
        (("1f1b", "--pp", "2.5"), {"pp": None}),
        (("zb-auto", "--cap", "0.5"), {"cap": 1}),
        (("auto", "--cap", "0.5"), {"cap": 1}),
        (("none.csv",), {"none.csv": None}),
    ],
)
def test_nearest_legal_values(refused, argv, nearest):
    assert refused(*argv) == nearest


def test_a_nearest_value_is_legal(refused, answer):
    for argv in (("dualpipe", "--pp", 5, "--microbatches", 7), ("looped-bfs", "--vpp", 1)):
        name, *rest = argv
        given = dict(zip(rest[::2], rest[1::2], strict=True))
        mended = {f"--{where}": value for where, value in refused(*argv).items()}
        answer(name, *(word for pair in (given | mended).items() for word in pair))


def test_a_table_in_a_file_must_make_sense(refused, answer):
    Path("a.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert answer("a.csv")["makespan"] == 9  # by hand: (m + p - 1)(F + I + W)
    argv = ("--pp", 3, "--microbatches", 4, "--vpp", 2, "--group", 1)
    assert refused("a.csv", *argv) == {"pp": 2, "microbatches": 2, "vpp": 1, "group": None}
    # Each waits for the other's.
    Path("b.csv").write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    (where,) = refused("b.csv")
    assert where.startswith("b.csv, rank ")
    Path("c.csv").write_text("0F0,0B0,hello\n")
    assert refused("c.csv").keys() == {"c.csv"}
    # A great many problems are some lines.
    Path("d.csv").write_text("".join("0F0,0F0,0B0," for _ in range(1000)) + "1F0\n")
    assert len(refused("d.csv")) <= 21


# ------------------------------------------------------------------------------------------


def test_it_starts_without_what_is_heavy():
    code = (
        "import sys; from plait.cli.main import main\n"
        "assert main(['schedule', 'zbv', '--json']) == 0\n"
        "heavy = {'torch', 'rich', 'numpy', 'transformers'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
        "assert main(['schedule', 'zbv']) == 0\n"
        "heavy = {'torch', 'numpy', 'transformers'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
