"""What starts a program, on how many processes: torchrun, deepspeed, accelerate, srun, mpirun,
docker, and what else stands before it in a command."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from plait.dialects.flags import Word
from plait.dialects.settings import Setting
from plait.dialects.shell import Command, Script, slurm

#: Flags of a wrapper that take no word after them; every other one does. Those that stand for a
#: module or a command of their own are handled where they are read.
_SWITCHES: dict[str, frozenset[str]] = {
    "torchrun": frozenset(
        "--standalone --no-python --no_python --run-path --run_path --use-env --use_env"
        " --use-libuv --use_libuv --signals-to-handle --duplicate-stdout-filters"
        " --virtual-local-rank --virtual_local_rank".split()
    )
    - {"--signals-to-handle", "--duplicate-stdout-filters"},
    "deepspeed": frozenset(
        "--force_multi --no_python --no_local_rank --no_ssh_check --elastic_training --no_ssh"
        " --enable_each_rank_log --bind_cores_to_rank --save_pid --use_pdb --version -v".split()
    )
    - {"--enable_each_rank_log"},
    "accelerate": frozenset(
        "--multi_gpu --multi-gpu --tpu --cpu --use_deepspeed --use-deepspeed --use_fsdp --use-fsdp"
        " --use_megatron_lm --use-megatron-lm --use_xpu --ipex --debug --quiet -q -m --module"
        " --no_python --no-python --same_network --same-network --tpu_cluster --no_tpu_cluster"
        " --tpu_use_sudo --downcast_bf16 --use_parallelism_config --use-parallelism-config"
        " --dynamo_use_fullgraph --dynamo_use_dynamic --dynamo_use_regional_compilation"
        " --enable_cpu_affinity --use_tp".split()
    ),
    "srun": frozenset(
        "-l --label -u --unbuffered --exclusive --overlap --overcommit -O --mpi-pmix -K -v -q"
        " --wait-all --pty --contiguous --preserve-env -E --multi-prog --no-container-mount-home"
        " --container-mount-home --container-writable --container-readonly"
        " --no-container-entrypoint"
        " --container-remap-root --no-container-remap-root --export-all -k --no-kill -H --hold"
        " --quiet --verbose --spread-job --whole --use-min-nodes --disable-status -X -Q".split()
    ),
    "mpirun": frozenset(
        "--allow-run-as-root -allow-run-as-root --oversubscribe --tag-output --report-bindings"
        " --nooversubscribe -v -q --display-map --display-allocation -l -verbose".split()
    ),
    "docker": frozenset(
        "-i -t -it -ti -d --rm --privileged --detach --init --interactive --tty -itd -dit"
        " --read-only --no-healthcheck --sig-proxy --oom-kill-disable".split()
    ),
    "nsys": frozenset(),
    "numactl": frozenset("--localalloc -l --show -s --hardware -H --touch".split()),
    "env": frozenset("-i - --ignore-environment -v --debug -0 --null".split()),
    "time": frozenset("-p -v --verbose -a --append --portability".split()),
    "timeout": frozenset("--preserve-status --foreground -v --verbose".split()),
    "sudo": frozenset("-E -H -S -n -A -b -i -s --preserve-env --login --non-interactive".split()),
    "nice": frozenset(),
    "taskset": frozenset("-a --all-tasks -c --cpu-list".split()),
    "stdbuf": frozenset(),
    "singularity": frozenset("--nv --rocm --cleanenv -e --contain -c --writable --no-home".split()),
    "python": frozenset("-u -O -OO -B -E -I -s -S -v -b -q -d -i -P -x".split()),
    "exec": frozenset(),
}  # fmt: skip
#: Other names of the same wrappers.
_ALSO = {
    "torch.distributed.run": "torchrun", "torch.distributed.launch": "torchrun",
    "deepspeed.launcher.runner": "deepspeed", "ds": "deepspeed",
    "accelerate.commands.launch": "accelerate", "accelerate-launch": "accelerate",
    "accelerate.commands.accelerate_cli": "accelerate",
    "mpiexec": "mpirun", "orterun": "mpirun", "prun": "mpirun",
    "podman": "docker", "nerdctl": "docker", "apptainer": "singularity",
    "nohup": "exec", "command": "exec", "builtin": "exec", "setsid": "exec", "unbuffer": "exec",
    "uv": "exec", "poetry": "exec", "coverage": "exec", "ionice": "nice",
    "ncu": "nsys", "rocprof": "nsys", "salloc": "srun", "sbatch": "srun",
}  # fmt: skip
#: Flags of `uv run` and its like that take a word; all others are switches.
_TAKING = frozenset(
    "--extra --group --only-group --no-group --with --with-editable --with-requirements --project"
    " --directory --python -p --package --env-file --index --index-url --rcfile -u".split()
)
_LAUNCHERS = ("torchrun", "deepspeed", "accelerate", "mpirun", "srun")


@dataclass(frozen=True)
class Run:
    """A program that a command starts.

    Attributes:
        program: the script, the module after `-m`, or the executable.
        words: its arguments.
        command: in which it stands.
        launcher: "torchrun", "deepspeed", "accelerate", "mpirun", "srun", or "": what decides
            how many processes there are.
        settings: the launcher's own flags, underscores as dashes ("--nproc-per-node").
        world: processes in all; None where that is not known.
        nodes: machines; None where that is not known.
        open: what decides the number of processes and is not known.
    """

    program: Word
    words: tuple[Word, ...]
    command: Command
    launcher: str = ""
    settings: tuple[Setting, ...] = ()
    world: int | None = None
    nodes: int | None = None
    open: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The program without its folder, and a module by its whole name."""
        return self.program.text.rstrip("/").rpartition("/")[2]

    @property
    def environment(self) -> dict[str, str]:
        return self.command.environment


def runs(script: Script) -> Iterator[Run]:
    """The program of each command of a script, under whatever starts it."""
    for command in script.commands:
        layers, words, switched = _unwrapped(command.words)
        outer = [
            layer for before in command.under for layer in _unwrapped(before.words)[0]
        ]  # the innermost decides
        if not words:
            continue
        program, rest = words[0], words[1:]
        world = _world([*outer, *layers], script)
        environment = command.environment | switched
        if switched:
            command = Command(command.words, environment, command.sure, command.under)
        yield Run(program, tuple(rest), command, *world)


def find(script: Script, programs: Iterable[str]) -> Run | None:
    """The run of the first program of these names (shell patterns: "pretrain_*.py", "vllm"); one
    that is sure to be started goes before others, and one with arguments before one without."""
    patterns = tuple(programs)
    found = [run for run in runs(script) if any(fnmatchcase(run.name, p) for p in patterns)]
    found.sort(key=lambda run: (not run.command.sure, not run.words))
    return found[0] if found else None


@dataclass(frozen=True)
class _Layer:
    name: str
    settings: tuple[Setting, ...]
    loose: tuple[Word, ...] = ()

    def get(self, *names: str) -> Setting | None:
        found = [s for s in self.settings if s.name in names]
        return found[-1] if found else None


def _unwrapped(words: Sequence[Word]) -> tuple[list[_Layer], list[Word], dict[str, str]]:
    """What stands before a program, the outermost first, and the program with its arguments."""
    layers: list[_Layer] = []
    environment: dict[str, str] = {}
    rest = list(words)
    for _ in range(20):
        while rest and re.match(r"[A-Za-z_]\w*=", rest[0].text) and layers:
            name, _, value = rest.pop(0).text.partition("=")
            environment[name] = value
        if not rest:
            break
        name = rest[0].text.rpartition("/")[2]
        name = "python" if re.fullmatch(r"python\d?(\.\d+)?", name) else _ALSO.get(name, name)
        if name in ("${PYTHON}", "$PYTHON", "$python", "${PYTHON_EXE}", "$PYTHON_EXE"):
            name = "python"
        if name not in _SWITCHES:
            break
        layer, rest = _layer(name, rest[1:])
        layers.append(layer)
        if layer.name == "python" and rest and layer.loose:
            module = layer.loose[0].text
            if module in _ALSO:
                rest = [Word(module, rest[0].where), *rest[1:]]
                continue
            break
    return layers, rest, environment


def _layer(name: str, words: list[Word]) -> tuple[_Layer, list[Word]]:
    """A wrapper's own flags, and what it starts."""
    found: list[Setting] = []
    loose: list[Word] = []
    rest = words
    if name == "accelerate" and rest and rest[0].text in ("launch", "accelerate_launch"):
        rest = rest[1:]
    if name == "python":
        return _python(rest)
    if name == "exec" and len(rest) > 1 and rest[0].text == "run":
        rest = rest[1:]
    while rest and rest[0].text.startswith("-") and len(rest[0].text) > 1:
        word, rest = rest[0], rest[1:]
        if word.text == "--":
            break
        key, equals, value = word.text.partition("=")
        spelled = key.replace("_", "-") if key.startswith("--") else key
        if equals:
            found.append(Setting(spelled, value, word.where, word.open))
        elif key in ("-m", "--module") and name in ("torchrun", "deepspeed", "accelerate"):
            found.append(Setting("--module", True, word.where))
        elif key in _SWITCHES[name] or (name in ("exec", "sudo") and key not in _TAKING):
            found.append(Setting(spelled, True, word.where))
        elif name == "srun" and re.fullmatch(r"-[Nn]\d+", key):
            found.append(Setting(key[:2], key[2:], word.where))
        elif rest and not (rest[0].text.startswith("-") and not rest[0].text[1:2].isdigit()):
            found.append(Setting(spelled, rest[0].text, word.where, rest[0].open))
            rest = rest[1:]
            if name == "mpirun" and key in ("-x", "-genv", "--mca", "-mca", "-map-by-pair"):
                rest = rest[1:] if key in ("--mca", "-mca", "-genv") else rest
        else:
            found.append(Setting(spelled, True, word.where))
    rest = _past_operands(name, rest, loose)
    return _Layer(name, tuple(found), tuple(loose)), rest


def _past_operands(name: str, rest: list[Word], loose: list[Word]) -> list[Word]:
    """Past what a wrapper takes besides flags: an image, a time, a subcommand."""
    if name in ("docker", "singularity") and rest:
        verb = rest[0].text
        if verb in ("run", "exec"):
            _, after = _layer(name, rest[1:])
            return after
        return rest[1:]  # the image
    if name == "nsys" and rest and rest[0].text in ("profile", "launch", "nvprof"):
        _, after = _layer(name, rest[1:])
        return after
    if name in ("timeout", "taskset") and rest:
        return rest[1:]
    return rest


def _python(words: list[Word]) -> tuple[_Layer, list[Word]]:
    rest = words
    while rest and rest[0].text.startswith("-"):
        word, rest = rest[0], rest[1:]
        if word.text == "-m" and rest:
            return _Layer("python", (), (rest[0],)), rest
        if word.text.startswith("-m") and len(word.text) > 2:
            module = Word(word.text[2:], word.where, word.open)
            return _Layer("python", (), (module,)), [module, *rest]
        if word.text in ("-W", "-X") and rest:
            rest = rest[1:]
        elif word.text == "-c":
            return _Layer("python", ()), []
    return _Layer("python", ()), rest


# How many processes there are.


def _world(
    layers: Sequence[_Layer], script: Script
) -> tuple[str, tuple[Setting, ...], int | None, int | None, tuple[str, ...]]:
    """The launcher that decides, its flags, the processes, the machines, and what is open."""
    # torchrun under srun: torchrun says how many; srun alone only where it starts the program.
    for name in _LAUNCHERS:
        found = [layer for layer in layers if layer.name == name]
        if found:
            settings = tuple(s for layer in found for s in layer.settings)
            whole = _Layer(name, settings if name == "srun" else found[-1].settings)
            return name, whole.settings, *_COUNTS[name](whole, script)
    return "", (), None, None, ()


def _count(setting: Setting | None, default: int | None = None) -> tuple[int | None, list[str]]:
    if setting is None:
        return default, []
    if setting.open:
        return None, list(setting.open)
    text = str(setting.value).partition(":")[0] or str(setting.value)
    if text.isascii() and text.isdecimal() and 0 < int(text[:9]) < 10**7:
        return int(text[:9]), []
    return None, [f"{setting.name} {setting.value}"]


def _product(
    each: tuple[int | None, list[str]], nodes: tuple[int | None, list[str]]
) -> tuple[int | None, int | None, tuple[str, ...]]:
    known = each[0] is not None and nodes[0] is not None
    world = each[0] * nodes[0] if known and each[0] and nodes[0] else None
    return world, nodes[0], tuple(dict.fromkeys([*each[1], *nodes[1]]))


def _torchrun(layer: _Layer, script: Script) -> tuple[int | None, int | None, tuple[str, ...]]:
    """torch/distributed/run.py: both are 1 by default; "gpu", "cpu", "auto" ask the machine, and
    "2:4" is elastic: the fewest count."""
    return _product(_count(layer.get("--nproc-per-node"), 1), _count(layer.get("--nnodes"), 1))


def _deepspeed(layer: _Layer, script: Script) -> tuple[int | None, int | None, tuple[str, ...]]:
    """deepspeed/launcher/runner.py: the slots of the hostfile, cut down by --include, --num_nodes
    and --num_gpus; without a hostfile, the GPUs of this machine."""
    gpus, nodes = layer.get("--num-gpus"), layer.get("--num-nodes")
    included = layer.get("--include", "-i")
    if included is not None and not included.open:
        hosts = [host for host in str(included.value).split("@") if host]
        slots = [host.partition(":")[2] for host in hosts]
        if all(slots):
            total = sum(_slots(slot) for slot in slots)
            return total or None, len(hosts), () if total else ("--include",)
        return None, len(hosts), ("the GPUs of a node",)
    hosts_file = layer.get("--hostfile", "-H")
    if hosts_file is not None and str(hosts_file.value) in script.files:
        slots_of = re.findall(
            r"^\s*[\w.-]+\s+slots\s*=\s*(\d{1,4})", script.files[str(hosts_file.value)], re.M
        )
        counts = [int(n) for n in slots_of]
        most, names = _count(nodes, len(counts))
        each, more = _count(gpus, max(counts, default=0))
        if most and each and not names and not more:
            return sum(min(n, each) for n in counts[:most]), min(most, len(counts)), ()
    missing = ["the GPUs of a node (--num_gpus)"] if gpus is None else []
    each = _count(gpus)
    return _product((each[0], each[1] + missing), _count(nodes, None if hosts_file else 1))


def _slots(text: str) -> int:
    count = 0
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(part) > 12:
            return 0
        count += int(last) - int(first) + 1 if dash else 1
    return max(count, 0)


def _accelerate(layer: _Layer, script: Script) -> tuple[int | None, int | None, tuple[str, ...]]:
    """accelerate/commands/launch.py: --num_processes is of all machines."""
    world, names = _count(layer.get("--num-processes"))
    nodes, more = _count(layer.get("--num-machines"))
    return world, nodes, (*names, *more)


def _mpirun(layer: _Layer, script: Script) -> tuple[int | None, int | None, tuple[str, ...]]:
    world, names = _count(layer.get("-np", "-n", "--np", "--n", "-c"))
    each, more = _count(layer.get("-npernode", "--npernode", "-N", "-ppn", "--ppn"))
    nodes = world // each if world and each and world % each == 0 else None
    return world, nodes, (*names, *more)


def _srun(layer: _Layer, script: Script) -> tuple[int | None, int | None, tuple[str, ...]]:
    """Tasks of srun's own flags, else of the job's: as many as nodes where none are asked for."""
    asked = {s.name.lstrip("-"): str(s.value) for s in layer.settings if s.name in _ASKED}
    asked = script.directives | asked
    nodes, names = _count(layer.get("-N", "--nodes"), slurm.number(asked.get("nodes")))
    tasks, more = _count(layer.get("-n", "--ntasks"))
    each, third = _count(layer.get("--ntasks-per-node"), slurm.number(asked.get("ntasks-per-node")))
    opened = (*names, *more, *third)
    if tasks is None and not opened:
        tasks = nodes * each if nodes and each else slurm.number(asked.get("ntasks")) or nodes
    return tasks, nodes, opened


_ASKED = ("--nodes", "--ntasks", "--ntasks-per-node")
_COUNTS = {
    "torchrun": _torchrun, "deepspeed": _deepspeed, "accelerate": _accelerate,
    "mpirun": _mpirun, "srun": _srun,
}  # fmt: skip
