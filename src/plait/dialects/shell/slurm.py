"""What a script asks of SLURM (`#SBATCH` lines), and the variables that SLURM then sets."""

import re

_LINE = re.compile(r"^#SBATCH[ \t]+(.*)$", re.MULTILINE)
_SHORT = {"N": "nodes", "n": "ntasks", "G": "gpus", "c": "cpus-per-task"}
_OPTION = re.compile(r"(?:--([\w-]+)|-([A-Za-z]))(?:[= \t]*([^\s#]+))?")


def directives(text: str) -> dict[str, str]:
    """Long name -> value of each `#SBATCH` option: {"nodes": "4", "gres": "gpu:8"}."""
    found: dict[str, str] = {}
    for line in _LINE.findall(text):
        rest = line.partition(" #")[0]
        for name, letter, value in re.findall(
            r"(?:^|\s)(?:--([\w-]+)|-([A-Za-z]))(?:=|[ \t]*)((?!-)\S*)", rest
        ):
            name = name or _SHORT.get(letter, "")
            if name:
                found[name] = value
    return found


def number(text: str | None) -> int | None:
    """The count in "8", "gpu:8", "gpu:a100:8", "4-8" (the least); None where there is none."""
    match = re.fullmatch(r"(?:[\w.-]+:)*(\d{1,6})(?:-\d+)?(?:\(.*\))?", text or "")
    return int(match[1]) if match else None


def gpus_per_node(asked: dict[str, str]) -> int | None:
    gres = asked.get("gres", "")
    if gres.startswith("gpu"):
        return number(gres.partition(",")[0])
    return number(asked.get("gpus-per-node")) or number(asked.get("gpus-per-task"))


def variables(asked: dict[str, str]) -> dict[str, str]:
    """What SLURM sets in the environment of a job that asks so."""
    nodes, tasks = number(asked.get("nodes")), number(asked.get("ntasks"))
    each, gpus = number(asked.get("ntasks-per-node")), gpus_per_node(asked)
    if tasks is None and nodes and each:
        tasks = nodes * each
    values = {
        "SLURM_NNODES": nodes, "SLURM_JOB_NUM_NODES": nodes, "SLURM_NTASKS": tasks,
        "SLURM_NPROCS": tasks, "SLURM_NTASKS_PER_NODE": each,
        "SLURM_GPUS_ON_NODE": gpus, "SLURM_GPUS_PER_NODE": gpus,
    }  # fmt: skip
    return {name: str(value) for name, value in values.items() if value}
