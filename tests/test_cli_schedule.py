"""`plait schedule`: what it answers, what it refuses, what it writes."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.cli.main import main
from plait.cli.schedule_question import read
from plait.schedules.check import check
from plait.schedules.csvfile import read_table
from plait.spec.findings import UserError, error
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


@pytest.mark.parametrize("name", ["zbv", "zb-h1", "dualpipe", "interleaved-1f1b"])
@pytest.mark.parametrize("width", [40, 60, 80])
def test_it_keeps_to_the_width_of_a_terminal(ask, monkeypatch, name, width):
    monkeypatch.setenv("COLUMNS", str(width))
    for more in ((), ("--vpp", 4) if name == "interleaved-1f1b" else ("--b", 1.25)):
        code, out, _ = ask(name, "--pp", 12, "--microbatches", 64, *more)
        assert code == 0
        assert max(map(len, out.splitlines())) <= max(width, 44)  # a sentence of 44 letters
        assert "…" not in out
        lines = out.splitlines()
        for rank in range(12):  # once with its numbers, once drawn
            assert sum(line.startswith(f"  {rank} ") for line in lines) == 1
            assert sum(line.startswith(f"  rank {rank} ") for line in lines) == 1


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


@pytest.mark.parametrize(
    "problem",
    [
        OSError(28, "No space left on device"),
        UserError([error("some part", None, "No space left on device")]),
    ],
)
def test_all_files_or_none(ask, monkeypatch, tmp_path, problem):
    """What breaks while files are written leaves nothing behind."""
    Path("a.svg").write_text("old")

    def full(*_):
        raise problem

    monkeypatch.setattr("plait.cli.schedule_files.write_table", full)
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
    Path("loop").symlink_to("loop")
    Path("file").touch()
    assert refused("1f1b", "--svg", "n" * 300, "--csv", "loop", "--trace", "file/a").keys() == {
        "svg", "csv", "trace",
    }  # fmt: skip
    Path("kept").touch(0o444)
    assert refused("1f1b", "--trace", "kept").keys() == {"trace"}


def test_the_longest_name_there_can_be(ask, tmp_path):
    assert ask("1f1b", "--svg", "n" * 255, "--csv", "c" * 255)[0] == 0
    assert {len(f.name) for f in tmp_path.iterdir()} == {255}


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755])
def test_a_file_that_is_replaced_keeps_its_mode(ask, mode):
    for name in ("a.svg", "a.json", "a.csv"):
        Path(name).touch()
        Path(name).chmod(mode)
    assert ask("1f1b", "--svg", "a.svg", "--trace", "a.json", "--csv", "a.csv")[0] == 0
    modes = {name: Path(name).stat().st_mode & 0o7777 for name in ("a.svg", "a.json", "a.csv")}
    assert modes == dict.fromkeys(modes, mode)
    assert all(Path(name).stat().st_size for name in modes)


@pytest.mark.parametrize("where", ["/dev/stdout", "/dev/stderr", "answer"])
@pytest.mark.parametrize("piped", [True, False])
def test_the_answer_is_not_written_over(tmp_path, where, piped):
    """Neither a pipe nor the file that the answer goes to can be one of the files."""
    if piped and where == "answer":
        Path(tmp_path / "answer").mkdir()
    command = [sys.executable, "-m", "plait.cli", "schedule", "1f1b", "--json", "--csv", where]
    with open(tmp_path / ("other" if piped else "answer"), "w+") as file:
        to = subprocess.PIPE if piped else file
        run = subprocess.run(command, cwd=tmp_path, stdout=to, stderr=to, text=True, check=False)
        file.seek(0)
        said = (run.stdout + run.stderr) if piped else file.read()
    assert run.returncode == 2, said
    assert [e["where"] for e in json.loads(said)["errors"]] == ["csv"]


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


#: What is refused, and taken once every nearest value has been put in its place.
ILLEGAL = [
    ("dualpipe", "--pp", 5, "--microbatches", 7),
    ("looped-bfs", "--vpp", 1),
    ("interleaved-1f1b", "--group", 0),
    ("interleaved-1f1b:2", "--pp", 8),
    ("interleaved-1f1b:2", "--pp", 8, "--group", 5),
    ("interleaved-1f1b", "--vpp", 0),
    ("interleaved-1f1b", "--vpp", 0, "--pp", -3, "--group", -1),
    ("zbv", "--vpp", 0, "--microbatches", -2),
    ("dualpipe", "--pp", 0),
    ("dualpipe", "--pp", 0, "--microbatches", 0),
    ("dualpipe", "--microbatches", 0),
    ("dualpipe", "--pp", 1001),
    ("dualpipe", "--pp", 1001, "--microbatches", 998),
    ("dualpipev", "--pp", 1001, "--microbatches", 3),
    ("1f1b", "--vpp", 3, "--group", 2),
    ("gpipe", "--pp", 2000),
    ("gpipe", "--pp", 10**17, "--microbatches", 10**17),
    ("interleaved-1f1b", "--vpp", 10**6, "--pp", 1000),
    ("zb-auto", "--cap", -1),
    ("auto", "--pp", 2, "--cap", -1),
    ("1f1b", "--cap", -1),
    ("1f1b", "--f", "5e-324", "--b", "1e-300,1,1,1", "--comm", "1e-13"),
    ("1f1b", "--f", 0, "--b", 0, "--w", -1),
    ("1f1b", "--f", "-1,0,0,0", "--b", "0", "--w", "-2"),
    ("1f1b", "--f", 1e300, "--comm", 2e12),
]


def mended(argv, nearest):
    """Arguments with the nearest value in the place of each that was refused."""
    (name, *rest), nearest = argv, dict(nearest)
    given = dict(zip(rest[::2], rest[1::2], strict=True))
    given |= {f"--{where}": value for where, value in nearest.items() if where != "schedule"}
    pairs = ((flag, value) for flag, value in given.items() if value is not None)
    return nearest.get("schedule", name), *(word for pair in pairs for word in pair)


@pytest.mark.parametrize("argv", ILLEGAL, ids=lambda argv: " ".join(map(str, argv)))
def test_every_nearest_value_is_taken(argv):
    with pytest.raises(UserError) as raised:
        read([str(word) for word in argv])
    nearest = {f.where: f.nearest for f in raised.value.findings}
    read([str(word) for word in mended(argv, nearest)])


@given(st.data())
def test_every_nearest_size_is_taken(data):
    """Of all schedules and sizes, legal or not."""
    name = data.draw(st.sampled_from(list(SCHEDULES)))
    size = st.none() | st.integers(-2, 12) | st.sampled_from([700, 707, 998, 1001, 10**6 + 1])
    sizes = {key: data.draw(size) for key in ("pp", "microbatches", "vpp", "group")}
    cap = data.draw(st.sampled_from([None, -1, 0, 0.5, 2, 1e13]))
    given_ = {f"--{key}": value for key, value in (sizes | {"cap": cap}).items()}
    if name == "interleaved-1f1b" and data.draw(st.booleans()):
        name += f":{data.draw(st.integers(1, 9))}"
    argv = [name, *(word for pair in given_.items() if pair[1] is not None for word in pair)]
    try:
        read([str(word) for word in argv])
    except UserError as problem:
        nearest = {f.where: f.nearest for f in problem.findings}
        read([str(word) for word in mended(argv, nearest)])


def test_long_texts_are_short_lines(ask):
    digits = "9" * 5000
    for argv in (
        (f"interleaved-1f1b:{digits}",),
        ("x" * 5000,),
        ("1f1b", "--pp", digits),
        ("interleaved-1f1b", "--group", digits),
        ("1f1b", "--f", digits),
        ("1f1b", "--cap", "x" * 5000),
    ):
        code, out, err = ask(*argv)
        assert (code, out) == (2, "")
        assert max(map(len, err.splitlines())) < 400, argv


def test_a_table_in_a_file_must_make_sense(refused, answer):
    Path("a.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert answer("a.csv")["makespan"] == 9  # by hand: (m + p - 1)(F + I + W)
    argv = ("--pp", 3, "--microbatches", 4, "--vpp", 2, "--group", 1)
    assert refused("a.csv", *argv) == {"pp": 2, "microbatches": 2, "vpp": 1, "group": None}
    # As many chunks on each rank is what vpp means.
    Path("u.csv").write_text("0F0,2F0,2B0,0B0\n1F0,1B0\n")
    assert answer("u.csv")["vpp"] is None
    assert refused("u.csv", "--vpp", 2) == {"vpp": None}
    # Each waits for the other's.
    Path("b.csv").write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    (where,) = refused("b.csv")
    assert where.startswith("b.csv, rank ")
    Path("c.csv").write_text("0F0,0B0,hello\n")
    assert refused("c.csv").keys() == {"c.csv"}
    # A great many problems are some lines.
    Path("d.csv").write_text("".join("0F0,0F0,0B0," for _ in range(1000)) + "1F0\n")
    assert len(refused("d.csv")) <= 21
    # Chunk i has micro batch i: of 20,000 chunks and micro batches nearly all is missing.
    Path("e.csv").write_text("".join(f"{i}F{i}\n" for i in range(20_000)))
    assert len(refused("e.csv")) == 1


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
