"""A rank's place among all ranks, as torchrun or SLURM tell it in the environment."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from plait.spec.findings import UserError, error


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
        UserError: the environment names a place but not where the ranks meet.
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
        local = int(env.get("LOCAL_RANK", rank))
        size = int(env.get("LOCAL_WORLD_SIZE", world))
        address, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    elif "SLURM_PROCID" in env and int(env.get("SLURM_NTASKS", 1)) > 1:
        rank, world = int(env["SLURM_PROCID"]), int(env["SLURM_NTASKS"])
        local = int(env.get("SLURM_LOCALID", 0))
        # "4(x2),3": tasks of each node, of which the largest number is safe to assume.
        tasks = re.sub(r"\(x\d+\)", "", env.get("SLURM_TASKS_PER_NODE", str(world)))
        size = max(int(n) for n in tasks.split(","))
        address = env.get("MASTER_ADDR") or first_host(env.get("SLURM_NODELIST", ""))
        # A job's number is the same on all nodes, and two jobs of a node differ in it.
        port = env.get("MASTER_PORT") or str(20000 + int(env.get("SLURM_JOB_ID", 0)) % 20000)
    else:
        return None
    if not address or not port:
        message = "RANK and WORLD_SIZE are set, but not where the ranks meet; set both"
        raise UserError([error("MASTER_ADDR, MASTER_PORT", None, message)])
    hosts = rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", env.get("SLURM_RESTART_COUNT", "0"))
    return Place(rank, world, local, size, address, int(port), hosts, attempt)


def first_host(nodes: str) -> str:
    """The first host of SLURM's short list: "gpu[07-09,12],login1" -> "gpu07"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes).group()
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first)
