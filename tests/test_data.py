"""The corpus: which bytes a sample has, in which order, and what is said of bad input."""

import os
import shutil
import sysconfig
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.spec.findings import UserError
from plait.spec.job import Batch, Data, Job, Train
from plait.spec.layout import Layout
from plait.spec.model import Model
from plait.train.data import Corpus, permuted

MODEL = Model.of("small", layers=1, hidden=8, heads=1, vocab=256)


def job(*path: Path, seq_len: int = 4, layout: Layout | None = None, **train) -> Job:
    layout = layout or Layout()
    train = {"global_batch": layout.micro_batch * layout.dp, "accumulation": 1} | train
    data = Data(path=tuple(str(p) for p in path))
    return Job(MODEL, layout, Train(seq_len=seq_len, **train), data)


def refusal(*path: Path, **given) -> list:
    with pytest.raises(UserError) as caught:
        Corpus.of(job(*path, **given))
    for finding in caught.value.findings:
        assert "\n" not in finding.line()
    return list(caught.value.findings)


@given(st.integers(1, 700), st.integers(0, 2**70), st.integers(0, 5))
def test_the_order_of_an_epoch_is_a_permutation(n, seed, epoch):
    assert sorted(permuted(i, n, seed, epoch) for i in range(n)) == list(range(n))


def test_the_order_depends_on_seed_and_epoch_and_looks_random():
    n = 1000
    orders = {
        (seed, epoch): [permuted(i, n, seed, epoch) for i in range(n)]
        for seed in range(3)
        for epoch in range(3)
    }
    assert len({tuple(o) for o in orders.values()}) == 9
    for a in orders.values():
        # Of a random permutation: fixed points are Poisson(1), the mean of |p(i) - i| is n / 3
        # with a deviation below 0.01 n, and neighbours are as far apart as any two positions.
        order = np.array(a)
        assert np.sum(order == np.arange(n)) < 10
        assert abs(np.abs(order - np.arange(n)).mean() - n / 3) < 0.05 * n
        assert abs(np.abs(np.diff(order)).mean() - n / 3) < 0.05 * n
    # Each position is sent everywhere equally often: chi-square of 16 cells, 2000 seeds.
    for i in (0, 7, 15):
        seen = Counter(permuted(i, 16, seed, 0) for seed in range(2000))
        assert sum((seen[k] - 125) ** 2 / 125 for k in range(16)) < 45  # p = 1e-4


def test_a_position_in_a_huge_corpus_is_found_at_once():
    n = 10**12
    assert len({permuted(i, n, 0, 0) for i in range(1000)}) == 1000


def test_files_are_joined_by_a_zero_byte_and_cut_into_windows(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"hijklmnop")
    (tmp_path / "a.txt").write_bytes(b"abcdefg")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.md").write_bytes(b"q\x00r\xff")
    (tmp_path / "none.txt").write_bytes(b"")
    (tmp_path / "other.bin").write_bytes(b"not read")
    (tmp_path / ".hidden.txt").write_bytes(b"not read")
    row = b"abcdefg\0hijklmnop\0q\x00r\xff"
    corpus = Corpus.of(job(tmp_path))
    assert corpus.bytes == len(row) == 22
    assert corpus.read(0, 22).tobytes() == row
    for start in range(22):
        for stop in range(start, 23):
            assert corpus.read(start, stop).tobytes() == row[start:stop]
    assert corpus.windows == 5  # 21 targets at 4 a window
    windows = [(list(row[k : k + 4]), list(row[k + 1 : k + 5])) for k in range(0, 20, 4)]
    for epoch in range(3):
        seen = [corpus.sample(epoch * 5 + i) for i in range(5)]
        assert all(t.dtype == np.int64 for pair in seen for t in pair)
        assert sorted((t.tolist(), u.tolist()) for t, u in seen) == sorted(windows)


def test_named_files_are_read_whatever_their_suffix_and_in_the_order_named(tmp_path):
    (tmp_path / "z.bin").write_bytes(b"first")
    (tmp_path / "a").write_bytes(b"second")
    corpus = Corpus.of(job(tmp_path / "z.bin", tmp_path / "a"))
    assert corpus.read(0, corpus.bytes).tobytes() == b"first\0second"


def test_documents_of_a_sample(tmp_path):
    for name, text in (("a", "abcdefg"), ("b", "h"), ("c", "ij"), ("d", "klmnopqrs")):
        (tmp_path / f"{name}.txt").write_text(text)
    masked = replace(job(tmp_path), data=Data(path=(str(tmp_path),), document_mask=True))
    corpus = Corpus.of(masked)
    # abcd efg0 h0ij 0klm nopq rs: a document ends with its zero byte.
    assert [corpus.documents(i) for i in range(5)] == [(4,), (4,), (2, 2), (1, 3), (4,)]
    tokens, _, _, documents = corpus.batch(0, masked, 0, 0)
    lengths = {bytes(corpus._window(i)[0].tolist()): corpus.documents(i) for i in range(5)}
    assert documents == [lengths[bytes(row.tolist())] for row in tokens]
    assert corpus.batch(0, job(tmp_path), 0, 0)[3] is None


def test_a_corpus_of_exactly_one_sample(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abcde")
    corpus = Corpus.of(job(tmp_path / "a.txt"))
    for i in (0, 1, 10**6):
        assert [x.tolist() for x in corpus.sample(i)] == [list(b"abcd"), list(b"bcde")]


LAYOUTS = [
    (Layout(micro_batch=8), 1),
    (Layout(micro_batch=2), 4),
    (Layout(dp_shard=4, micro_batch=1), 2),
    (Layout(dp_replicate=2, dp_shard=2, micro_batch=2), 1),
    (Layout(tp=2, dp_shard=8, micro_batch=1), 1),
]


@pytest.mark.parametrize(("layout", "accumulation"), LAYOUTS)
def test_sample_i_of_step_t_is_the_same_in_every_layout(tmp_path, layout, accumulation):
    (tmp_path / "a.txt").write_bytes(bytes(range(256)))
    whole = job(tmp_path / "a.txt", layout=layout, global_batch=8, accumulation=accumulation)
    assert whole.batch == Batch.fill(layout.dp, layout.micro_batch, None, accumulation)
    corpus = Corpus.of(whole)
    for step in (0, 1, 30):
        numbers = []
        for a in range(accumulation):
            for rank in range(layout.dp):
                tokens, targets, index, _ = corpus.batch(step, whole, rank, a)
                assert tokens.shape == targets.shape == (layout.micro_batch, 4)
                assert tokens.dtype == targets.dtype == index.dtype == torch.int64
                for j, number in enumerate(index.tolist()):
                    want = corpus.sample(number)
                    assert tokens[j].tolist() == want[0].tolist()
                    assert targets[j].tolist() == want[1].tolist()
                numbers += index.tolist()
        assert numbers == list(range(step * 8, step * 8 + 8))


def test_without_a_path_the_corpus_is_the_source_of_the_standard_library():
    corpus = Corpus.of(job(seq_len=512))
    names = {p.relative_to(sysconfig.get_path("stdlib")).as_posix() for p in corpus.files}
    assert {"argparse.py", "json/decoder.py"} <= names
    left_out = {"site-packages", "test", "tests", "idle_test"}
    assert not any(left_out & set(Path(n).parts) for n in names)
    assert corpus.bytes > 3_000_000
    again = Corpus.of(job(seq_len=512, seed=0))
    assert again.sample(12345)[0].tolist() == corpus.sample(12345)[0].tolist()
    other = Corpus.of(job(seq_len=512, seed=1))
    assert other.sample(12345)[0].tolist() != corpus.sample(12345)[0].tolist()


def test_a_missing_path_is_named_with_the_nearest_one(tmp_path):
    (tmp_path / "corpus.txt").write_bytes(b"text")
    (finding,) = refusal(tmp_path / "corups.txt")
    assert finding.where == "data.path"
    assert "does not exist" in finding.message
    assert finding.nearest == str(tmp_path / "corpus.txt")


def test_all_bad_paths_are_named_at_once(tmp_path):
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x.bin").write_bytes(b"binary")
    os.mkfifo(tmp_path / "pipe")
    bad = ("missing", "empty.txt", "folder", "pipe")
    findings = refusal(*(tmp_path / name for name in bad))
    assert [Path(f.value).name for f in findings] == list(bad)
    words = ("does not exist", "is empty", "no file with text", "neither a file nor a folder")
    for finding, word in zip(findings, words, strict=True):
        assert word in finding.message


def test_a_corpus_shorter_than_a_sample_names_the_longest_legal_one(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"0123456789")
    (finding,) = refusal(tmp_path / "a.txt", seq_len=10)
    assert (finding.where, finding.value, finding.nearest) == ("train.seq_len", 10, 9)
    assert "10 bytes" in finding.message
    Corpus.of(job(tmp_path / "a.txt", seq_len=9))


@pytest.mark.parametrize("what", ["file", "folder", "file in a folder"])
def test_what_may_not_be_read_is_named(what):
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    (folder / "a.txt").write_bytes(b"some text")
    locked = folder if what == "folder" else folder / "a.txt"
    named = folder / "a.txt" if what == "file" else folder
    locked.chmod(0)
    pid = os.fork()
    if pid == 0:  # root may read everything: be somebody else
        code = 1
        try:
            if os.getuid() == 0:
                os.setuid(65534)
            Corpus.of(job(named))
        except UserError as e:
            (finding,) = e.findings
            code = 0 if "cannot be read: Permission denied" in finding.message else 2
        finally:
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    folder.chmod(0o755)
    shutil.rmtree(folder)
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_file_that_shrinks_or_goes_while_it_is_read(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"0123456789")
    corpus = Corpus.of(job(path))
    path.write_bytes(b"0123")
    with pytest.raises(UserError, match="became shorter"):
        corpus.read(0, 10)
    other = replace(corpus, seq_len=5)
    path.unlink()
    with pytest.raises(UserError, match="cannot be read"):
        other.read(0, 10)
