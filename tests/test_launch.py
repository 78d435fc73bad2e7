"""Starting and joining ranks, what is said when they end, and what a run reports on its way."""

import json
import math
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from plait.spec.findings import UserError, error
from plait.spec.job import Checkpoint, Data, Job, Train
from plait.spec.layout import Layout
from plait.spec.model import Model
from plait.train.launch import RunFailed, World, resolve_dtype, run
from plait.train.metrics import Metrics, Share
from plait.train.place import first_host, joined

FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Result:
    total: float
    dtype: str


def job(mode: str = "", ranks: int = 2, **train) -> Job:
    """A job whose data path tells `work` what to do."""
    model = Model.of("small", layers=1, hidden=8, heads=1, vocab=256)
    train = Train(**({"steps": 4, "seq_len": 4, "global_batch": ranks} | train))
    kept = Checkpoint(folder="none")
    return Job(model, Layout(dp_shard=ranks), train, Data(path=(mode,)), kept)


def work(job: Job, world: World, report: Metrics) -> Result:
    """A few steps that only sum something; in step 2, rank 1 (or each rank) ends as told."""
    (mode,) = job.data.path
    report.start()
    if mode.startswith("wait "):
        Path(mode[5:], str(world.rank)).write_text(str(os.getpid()))
    for step in range(job.train.steps):
        world.at_step(step)
        if step == 2 and world.rank == 1:
            if mode == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if mode == "hang":
                time.sleep(600)
            if mode == "leave":
                os._exit(7)
            if mode == "raise":
                raise ValueError("two\nlines")
            if mode == "refuse alone":
                raise UserError([error("metrics", "f", "f cannot be written")])
        if step == 2 and mode == "refuse":
            problems = [error("data.path", "x", "x is gone", "y"), error("b", 1, "b is wrong")]
            raise UserError(problems)
        if step == 2 and mode == "nan":
            raise RunFailed(f"the loss is NaN in step {step}")
        if mode.startswith("wait ") and step == 1:
            time.sleep(600)
        total = torch.ones(3)
        dist.all_reduce(total)
        report.step(step, float(total[0]), 1.0, 1e-3, 0.01, 1000)
    return Result(float(total[0]), job.train.dtype)


if __name__ == "__main__":
    sys.exit(run(job(sys.argv[1]), work=work))


# ------------------------------------------------------------------------------------------
# Ranks that are started here


def launched(capsys, mode: str, as_json: bool = False, **train) -> tuple[int, str, str]:
    code = run(job(mode, **train), as_json, work)
    out, err = capsys.readouterr()
    assert "Traceback" not in err + out
    return code, out, err


ENDS = {
    "kill": (1, ["rank 1 died in step 2: killed by SIGKILL (as the system does when memory"]),
    "leave": (1, ["rank 1 died in step 2: it exited with code 7"]),
    "raise": (1, ["rank 1 died in step 2: ValueError: two (test_launch.py:"]),
    "refuse": (2, ["data.path: x is gone (nearest: y)", "b: b is wrong"]),
    "refuse alone": (2, ["metrics: f cannot be written"]),
    "nan": (1, ["the loss is NaN in step 2"]),
    "": (0, []),
}


@pytest.mark.parametrize("mode", ENDS)
def test_a_run_ends_with_one_line_a_problem(capsys, mode):
    code, lines = ENDS[mode]
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    got, out, err = launched(capsys, mode)
    assert got == code
    assert out == ""
    assert len(err.splitlines()) == len(lines)
    for line, start in zip(err.splitlines(), lines, strict=True):
        assert line.startswith(start)
    assert handlers == [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]


def test_as_json_stdout_is_one_object(capsys):
    code, out, _ = launched(capsys, "", as_json=True)
    assert code == 0
    assert json.loads(out) == {"total": 2.0, "dtype": "float32"}
    code, out, err = launched(capsys, "refuse", as_json=True)
    assert (code, err) == (2, "")
    first = {"where": "data.path", "value": "x", "message": "x is gone", "nearest": "y"}
    assert json.loads(out)["errors"][0] == first
    code, out, _ = launched(capsys, "nan", as_json=True)
    assert code == 1
    assert json.loads(out)["errors"][0]["message"] == "the loss is NaN in step 2"


def test_ranks_that_wait_for_nothing_end_after_the_timeout(capsys):
    code, _, err = launched(capsys, "hang", timeout=1.0)
    assert code == 1
    assert err.startswith("rank 1 no longer answered in step 2: rank 0 lost the others (")
    assert len(err.splitlines()) == 1


def running(pid: int) -> bool:
    """Whether a process is there and is not just waiting to be buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# What is sent: Ctrl-C in a terminal reaches all processes, kill only the launcher.
STOPS = {
    "Ctrl-C": (os.killpg, signal.SIGINT, 130),
    "interrupted": (os.kill, signal.SIGINT, 130),
    "terminated": (os.kill, signal.SIGTERM, 143),
    "killed": (os.kill, signal.SIGKILL, -9),
}


def test_a_stopped_run_leaves_nothing_behind(tmp_path):
    launchers = {}
    for name in STOPS:
        (tmp_path / name).mkdir()
        launchers[name] = subprocess.Popen(
            [sys.executable, __file__, f"wait {tmp_path / name}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"TMPDIR": str(tmp_path)},
            start_new_session=True,
            text=True,
        )
    for name, launcher in launchers.items():
        send, what, code = STOPS[name]
        lines = [launcher.stderr.readline(), launcher.stderr.readline()]
        assert lines[0] == "2 ranks on CPU: gloo, float32\n"
        assert lines[1].startswith("step 1/4  loss 2.0000")
        pids = [int(p.read_text()) for p in (tmp_path / name).iterdir()]
        assert len(pids) == 2
        assert all(map(running, pids))
        send(launcher.pid, what)
        out, err = launcher.communicate(timeout=60)
        assert (launcher.returncode, out) == (code, ""), name
        assert "Traceback" not in err, name
        if name != "killed":  # then Python itself notes which semaphores nobody gave back
            assert err == "", name
        deadline = time.monotonic() + 10
        while any(map(running, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(running, pids)), name
    assert list(tmp_path.glob("plait-*")) == []


@pytest.mark.parametrize("seconds", [0.6, 1.5, 3.0])
@pytest.mark.parametrize("stop", ["Ctrl-C", "terminated"])
def test_a_run_that_is_stopped_while_it_starts_leaves_nothing_behind(tmp_path, stop, seconds):
    """What exists of a run by then: its lock, a shared folder, the server that ranks come from."""
    command = [sys.executable, "-m", "plait.cli", "train", "--ranks", "2", "--steps", "9999"]
    launcher = subprocess.Popen(
        [*command, "--checkpoint.folder", "kept"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        start_new_session=True,
        text=True,
    )
    time.sleep(seconds)
    send, what, code = STOPS[stop]
    send(launcher.pid, what)
    _, err = launcher.communicate(timeout=60)
    if launcher.returncode != -what:  # Python itself was not yet up
        assert launcher.returncode == code, err
        assert "Traceback" not in err
    assert not list(tmp_path.glob("kept/.lock"))
    assert list(tmp_path.glob("plait-*")) == []


# ------------------------------------------------------------------------------------------
# Ranks that others started


def _joining(rank: int, port: int, env: dict, job: Job, as_json: bool) -> None:
    os.environ.update({k: v.format(rank=rank, port=port) for k, v in env.items()})
    os._exit(run(job, as_json, work))


def join(env: dict, job: Job, ranks: int = 2, as_json: bool = False) -> list[int]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    args = [(rank, port, env, job, as_json) for rank in range(ranks)]
    processes = [FORK.Process(target=_joining, args=a) for a in args]
    for p in processes:
        p.start()
    for p in processes:
        p.join(60)
    return [p.exitcode for p in processes]


TORCHRUN = {
    "RANK": "{rank}",
    "LOCAL_RANK": "{rank}",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "{port}",
}
SLURM = {
    "SLURM_PROCID": "{rank}",
    "SLURM_LOCALID": "{rank}",
    "SLURM_NTASKS": "2",
    "SLURM_NODELIST": "localhost",
    "MASTER_PORT": "{port}",
}


@pytest.mark.parametrize("env", [TORCHRUN, SLURM], ids=["torchrun", "slurm"])
def test_ranks_that_others_started_join(capfd, env):
    assert join(env, job(), as_json=True) == [0, 0]
    out, err = capfd.readouterr()
    assert json.loads(out) == {"total": 2.0, "dtype": "float32"}
    assert err.splitlines()[0] == "2 ranks on CPU: gloo, float32"


def test_a_world_size_that_does_not_match_is_one_line(capfd):
    assert join(TORCHRUN, job(ranks=4)) == [2, 2]
    out, err = capfd.readouterr()
    assert out == ""
    assert err == (
        "ranks: 2 ranks were started, the layout needs 4 (tp 1 x cp 1 x pp 1 x dp 4) (nearest: 4)\n"
    )


def test_joined_ranks_say_what_ended_them_once(capfd):
    assert join(TORCHRUN, job("refuse")) == [2, 2]
    err = capfd.readouterr().err
    assert err.count("x is gone") == err.count("b is wrong") == 1
    assert join(TORCHRUN, job("raise")) == [1, 1]
    err = capfd.readouterr().err
    assert "Traceback" not in err
    (line,) = [x for x in err.splitlines()[1:] if not x.startswith("step ")]
    assert line.startswith("rank 1 stopped in step 2: ValueError: two")


def test_the_place_that_torchrun_gives():
    env = {k: v.format(rank=1, port=29500) for k, v in TORCHRUN.items()}
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "3"}
    place = joined(env | agent)
    assert (place.rank, place.world_size, place.local_rank, place.local_size) == (1, 2, 1, 2)
    assert (place.address, place.port, place.attempt) == ("127.0.0.1", 29500, "3")
    assert not place.hosts
    assert joined(env | {"RANK": "0"}).hosts
    assert not joined(env | agent | {"RANK": "0"}).hosts


def test_the_place_that_slurm_gives():
    env = {
        "SLURM_PROCID": "5",
        "SLURM_NTASKS": "8",
        "SLURM_LOCALID": "1",
        "SLURM_TASKS_PER_NODE": "4(x2)",
        "SLURM_NODELIST": "gpu[07-08]",
        "SLURM_JOB_ID": "123456",
    }
    place = joined(env)
    assert (place.rank, place.world_size, place.local_rank, place.local_size) == (5, 8, 1, 4)
    assert place.address == "gpu07"
    assert place.port == joined(env | {"SLURM_PROCID": "0"}).port
    assert place.port != joined(env | {"SLURM_JOB_ID": "123457"}).port


@pytest.mark.parametrize(
    ("said", "where"),
    [
        ({"RANK": "a", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "0", "WORLD_SIZE": "-2"}, "WORLD_SIZE"),
        ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "99999"}, "MASTER_PORT"),
        ({"SLURM_PROCID": "x", "SLURM_NTASKS": "2"}, "SLURM_PROCID"),
    ],
)
def test_a_place_that_cannot_be(said, where):
    with pytest.raises(UserError) as e:
        joined({"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"} | said)
    assert where in {f.where for f in e.value.findings}


def test_nobody_gave_a_place():
    assert joined({}) is None
    assert joined({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None
    with pytest.raises(UserError, match="MASTER_ADDR"):
        joined({"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("gpu[3,5]", "gpu3"),
        ("a,b[1-2]", "a"),
        ("rack[1-2]n[05-06]", "rack1n05"),
        ("n[001-100]-ib.example", "n001-ib.example"),
    ],
)
def test_the_first_host_of_a_slurm_list(nodes, host):
    assert first_host(nodes) == host


def test_dtype_is_decided_by_the_device(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert resolve_dtype(job(), cpu).train.dtype == "float32"
    assert resolve_dtype(job(dtype="float64"), gpu).train.dtype == "float64"
    for has, dtype in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, h=has: h)
        assert resolve_dtype(job(), gpu).train.dtype == dtype


# ------------------------------------------------------------------------------------------
# What a run reports on its way


def reported(path: Path, first_step: int, losses: list[float], rank: int = 0) -> list[dict]:
    with Metrics(replace(job(steps=10), metrics=str(path)), rank) as report:
        report.start(first_step)
        for step, loss in enumerate(losses, first_step):
            report.step(step, loss, 1.5, 1e-3, 0.5, 1024, skipped=math.isnan(loss))
            # Each line is there as soon as its step is done.
            if rank == 0:
                assert path.read_text().count("\n") == step + 1
    return [json.loads(line) for line in path.read_text().splitlines()] if rank == 0 else []


def test_each_step_is_a_line_of_valid_json(tmp_path):
    lines = reported(tmp_path / "new" / "m.jsonl", 0, [3.0, float("nan"), float("inf")])
    assert lines[0] == {
        "step": 0,
        "loss": 3.0,
        "grad_norm": 1.5,
        "tokens_per_second": 16.0,  # 2 samples of 4 tokens in half a second
        "learning_rate": 1e-3,
        "seconds": 0.5,
        "memory_bytes": 1024,
        "skipped": False,
    }
    assert [line["loss"] for line in lines] == [3.0, None, None]
    assert lines[1]["skipped"] is True


def test_a_resumed_run_drops_the_lines_of_steps_that_come_again(tmp_path):
    path = tmp_path / "m.jsonl"
    reported(path, 0, [5.0, 4.0, 3.0, 2.0])
    with open(path, "a") as file:
        file.write('{"step": 4, "lo')  # killed while it wrote
    lines = reported(path, 2, [30.0, 20.0])
    assert [(line["step"], line["loss"]) for line in lines] == [
        (0, 5.0),
        (1, 4.0),
        (2, 30.0),
        (3, 20.0),
    ]
    assert [line["loss"] for line in reported(path, 0, [1.0])] == [1.0]
    assert os.listdir(tmp_path) == ["m.jsonl"]


def test_only_rank_0_reports(tmp_path, capsys):
    reported(tmp_path / "m.jsonl", 0, [1.0], rank=1)
    assert os.listdir(tmp_path) == []
    assert capsys.readouterr() == ("", "")


def test_a_metrics_file_that_cannot_be_written_is_said_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "m.jsonl"):
        for first_step in (0, 3):
            with pytest.raises(UserError) as caught:
                Metrics(replace(job(), metrics=str(path))).start(first_step)
            (finding,) = caught.value.findings
            assert finding.where == "metrics"
            assert "cannot be written" in finding.message


def test_without_a_terminal_progress_is_a_plain_line_now_and_then(tmp_path, capsys):
    reported(tmp_path / "m.jsonl", 0, [float(k) for k in range(10)])
    out, err = capsys.readouterr()
    assert out == ""
    first, last = err.splitlines()
    assert first.startswith("step 1/10  loss 0.0000  16 tokens/s  0:04 left  1.00 KiB")
    assert last.startswith("step 10/10  loss 9.0000")
    assert "0:00 left" in last


def test_on_a_terminal_progress_is_one_live_line_and_the_cursor_comes_back():
    master, slave = os.openpty()
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(slave, 2)
            sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
            os.environ |= {"TERM": "xterm", "COLUMNS": "120"}
            with Metrics(job(steps=2)) as report:
                report.start()
                report.step(0, 3.25, 1.5, 1e-3, 0.5, 2**20)
                report.step(1, 2.75, 1.5, 1e-3, 0.5, 2**20)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    text = os.read(master, 100_000).decode()
    assert "2/2" in text
    assert "loss 2.7500" in text
    assert "0:00 left" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_the_summary_merges_ranks_that_are_alike_and_prints_paths_whole(capsys):
    held = {"parameters": 2**20, "optimizer": 2**21}
    shares = [Share(r, held, {"tp all-reduce": 2**10 * (1 + r // 3)}) for r in (2, 0, 1, 3)]
    folder = "/a/very/long/path" * 12
    command = f"plait train --checkpoint.resume {folder}"
    Metrics(job()).summary(shares, checkpoint=folder, command=command)
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    cells = [[c.strip() for c in x.strip("│┃").split("│")] for x in lines[3:-3]]
    assert [c.strip() for c in lines[1].strip("┃").split("┃")] == ["bytes of rank", "0-2", "3"]
    assert [row for row in cells if len(row) == 3] == [
        ["parameters", "1.00 MiB", "1.00 MiB"],
        ["optimizer", "2.00 MiB", "2.00 MiB"],
        ["held at the peak", "3.00 MiB", "3.00 MiB"],
        ["tp all-reduce", "1.00 KiB", "2.00 KiB"],
        ["sent a step", "1.00 KiB", "2.00 KiB"],
    ]
    assert lines[-2] == f"checkpoint  {folder}"
    assert lines[-1] == f"continue    plait train --checkpoint.resume {folder}"
