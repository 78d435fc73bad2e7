"""Tables in files: ours, and torch's."""

import csv
import os
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from plait.schedules import csvfile
from plait.schedules.build import build
from plait.schedules.csvfile import read_table, write_table
from plait.schedules.table import Action, Table
from plait.spec.findings import UserError

EVEN = ["gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zbv", "v-min", "dualpipe"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tables")


def refused(text: str | bytes, folder) -> list[str]:
    path = folder / "bad.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as raised:
        read_table(path)
    assert all(f.where == str(path) for f in raised.value.findings)
    return [f.message for f in raised.value.findings]


@given(st.sampled_from(EVEN), st.sampled_from([2, 4]), st.integers(4, 8))
def test_round_trip_and_torch_reads_the_same_cells(folder, name, pp, m):
    table = build(name, pp, 2 * m)
    path = folder / "my.csv"
    write_table(table, path)
    assert read_table(path) == Table("my.csv", table.ranks)
    with open(path, newline="") as file:
        rows = [
            [torch_schedules._Action.from_str(cell) for cell in row] for row in csv.reader(file)
        ]
    torchs = [[(a.computation_type.value, *a[::2][:2]) for a in row] for row in rows]
    assert torchs == [[(kind, c, micro) for kind, c, micro in r] for r in table.ranks]


class Pipeline(torch_schedules._PipelineScheduleRuntime):
    """A schedule of torch as far as its files go; it has no stages and no processes."""

    def __init__(self, pp: int, chunks: int, micro_batches: int):
        self.pp_group_size, self._num_stages, self._n_microbatches = pp, chunks, micro_batches
        self._stages, self.pipeline_order, self._defer_pp_recv = [], {}, False


@pytest.mark.parametrize(
    ("name", "vpp"), [("zbv", 2), ("1f1b", 1), ("interleaved-1f1b", 2), ("zb-h1", 2), ("v-half", 2)]
)
def test_torch_loads_what_is_written_and_what_it_dumps_is_read(name, vpp, tmp_path):
    table = build(name, 4, 8, vpp)
    write_table(table, tmp_path / "ours.csv")
    pipeline = Pipeline(4, 4 * vpp, 8)
    pipeline._load_csv(str(tmp_path / "ours.csv"))
    assert pipeline.stage_index_to_group_rank == {
        chunk: rank for rank, chunks in enumerate(table.held) for chunk in chunks
    }
    for form in ("compute_only", "compute_comms"):
        pipeline._dump_csv(str(tmp_path / "torchs.csv"), format=form)
        read = read_table(tmp_path / "torchs.csv")
        if form == "compute_only" or not table.split:
            assert read.ranks == table.ranks
        # torch may move a W past a message, and joins an I and its W that stand together.
        assert [len({(a.chunk, a.micro) for a in r}) for r in read.ranks] == [8 * vpp] * 4


def test_overlapped_pairs_and_waiting(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,,0F1,(0F2;1B0)OVERLAP_F_B\n,0SEND_F0, 2F0 ,2UNSHARD,2I0,2W0\n\n,\n")
    assert read_table(path).ranks == (
        (Action("F", 0, 0), Action("F", 0, 1), Action("F", 0, 2), Action("B", 1, 0)),
        (Action("F", 2, 0), Action("I", 2, 0), Action("W", 2, 0)),
    )


def test_every_bad_cell_is_named(tmp_path):
    found = refused("0F0,0X0,F0\n(0F0;x)OVERLAP_F_B,1B0,-1F0\n", tmp_path)
    assert [message.partition(" is ")[0] for message in found] == [
        "row 1, cell 2: '0X0'",
        "row 1, cell 3: 'F0'",
        "row 2, cell 1: '(0F0;x)OVERLAP_F_B'",
        "row 2, cell 3: '-1F0'",
    ]
    many = refused("nonsense," * 99 + "nonsense", tmp_path)
    assert len(many) == 21
    assert many[-1] == "and 80 more such cells"


def test_files_that_are_no_tables(tmp_path, monkeypatch):
    assert "no rows" in refused("\n\n", tmp_path)[0]
    assert "rank 1 has nothing to do" in refused("0F0\n,,\n1F0\n", tmp_path)[0]
    assert "numbered beyond" in refused("999999999F0\n", tmp_path)[0]
    assert "no CSV" in refused(b"\xff\xfe0F0", tmp_path)[0]
    assert "no CSV" in refused('"0F0\n', tmp_path)[0]
    monkeypatch.setattr(csvfile, "_MOST_BYTES", 8)
    assert "larger" in refused("0F0,0F1,0F2", tmp_path)[0]
    with pytest.raises(UserError, match="No such file"):
        read_table(tmp_path / "none.csv")
    with pytest.raises(UserError, match="cannot be written"):
        write_table(build("1f1b", 2, 2), tmp_path / "none" / "t.csv")


def test_what_is_no_regular_file_is_not_read(tmp_path):
    """A pipe or a device may never begin, or never end."""
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "zero.csv").symlink_to("/dev/zero")
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "loop.csv").symlink_to("loop.csv")
    for name, what in {
        "pipe.csv": "no regular file",
        "zero.csv": "no regular file",
        "folder.csv": "no regular file",
        "loop.csv": "symbolic links",
        "n" * 300 + ".csv": "name too long",
        "null\0.csv": "null",
    }.items():
        with pytest.raises(UserError, match=what) as raised:
            read_table(tmp_path / name)
        assert len(raised.value.findings) == 1


def test_large_files(tmp_path, monkeypatch):
    """What is wrong is counted, of which the first is kept; a table has so many forwards."""
    monkeypatch.setattr(csvfile, "_MOST_BYTES", 2**20)
    tracemalloc.start()
    many = refused("x," * 200_000 + "x", tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (len(many), many[-1]) == (21, "and 199981 more such cells")
    assert peak < 20e6  # findings of all of them would be a hundred
    monkeypatch.setattr(csvfile, "MOST_FORWARDS", 3)
    assert "3 forwards, and this one has 4" in refused("0F0,0F1,0F2,0F3", tmp_path)[0]
