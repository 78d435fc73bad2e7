"""A rank's place among all ranks, as torchrun or SLURM tell it in the environment."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from plait.spec.findings import Finding, UserError, error


@dataclass(frozen=True)
class Place:
    """A rank's place as whoever started it says, and the address where the ranks meet.

    Attributes:
        local_size: ranks on this machine.
        hosts: this rank must itself run the store at the address.
        attempt: how often the ranks were started before.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    hosts: bool
    attempt: str


def joined(env: Mapping[str, str]) -> Place | None:
    """The place that torchrun or SLURM gave this process; None if nobody did.

    Raises:
        UserError: the environment names a place that cannot be, or not where the ranks meet.
    """
    findings: list[Finding] = []

    def number(name: str, default: int, low: int = 0, high: int = 2**31) -> int:
        text = env.get(name, str(default))
        if text.isdecimal() and low <= int(text) < high:
            return int(text)
        message = f"{text!r} is no whole number from {low} to {high - 1}"
        findings.append(error(name, text, message, default if name not in env else None))
        return default

    if "RANK" in env and "WORLD_SIZE" in env:
        world = number("WORLD_SIZE", 1, 1)
        rank = number("RANK", 0, 0, world)
        local = number("LOCAL_RANK", rank)
        size = number("LOCAL_WORLD_SIZE", world, 1)
        address, port = env.get("MASTER_ADDR"), number("MASTER_PORT", 0, 0, 2**16)
        named = "RANK and WORLD_SIZE"
    elif "SLURM_PROCID" in env and env.get("SLURM_NTASKS", "1") != "1":
        world = number("SLURM_NTASKS", 1, 1)
        rank, local = number("SLURM_PROCID", 0, 0, world), number("SLURM_LOCALID", 0)
        # "4(x2),3": tasks of each node, of which the largest number is safe to assume.
        tasks = re.sub(r"\(x\d+\)", "", env.get("SLURM_TASKS_PER_NODE", str(world)))
        size = max((int(n) for n in tasks.split(",") if n.isdecimal()), default=world)
        address = env.get("MASTER_ADDR") or first_host(env.get("SLURM_NODELIST", ""))
        # A job's number is the same on all nodes, and two jobs of a node differ in it.
        port = number("MASTER_PORT", 20000 + number("SLURM_JOB_ID", 0) % 20000, 0, 2**16)
        named = "SLURM_PROCID and SLURM_NTASKS"
    else:
        return None
    if not findings and not (address and port):
        message = f"{named} are set, but not where the ranks meet; set both"
        findings.append(error("MASTER_ADDR, MASTER_PORT", None, message))
    if findings:
        raise UserError(findings)
    hosts = rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", env.get("SLURM_RESTART_COUNT", "0"))
    return Place(rank, world, local, size, address, port, hosts, attempt)


def first_host(nodes: str) -> str:
    """The first host of SLURM's short list: "gpu[07-09,12],login1" -> "gpu07"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes).group()
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first)
