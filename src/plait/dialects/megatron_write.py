"""A job in Megatron's arguments."""

from typing import Any

from plait.spec.findings import Finding
from plait.spec.job import Job


def arguments_of(job: Job, target: str = "Megatron-LM") -> tuple[dict[str, Any], list[Finding]]:
    """The arguments that make Megatron run a job, and a note for each thing that they cannot say.

    Returns:
        argument -> value by Megatron's names, in the order in which a person would write them:
        numbers, texts, lists, True and False. Those that are at Megatron's default are left out
        unless they decide the layout.
    """
    return {}, []
