"""Megatron's own validation: what it refuses, at start or in the first step, and what it changes.

Sources: megatron/training/arguments.py (validate_args), megatron/core/parallel_state.py,
core/transformer/transformer_config.py, core/pipeline_parallel/schedules.py, core/transformer/moe.
"""

from collections.abc import Callable, Mapping
from typing import Any

from plait.dialects.megatron_names import dashed
from plait.spec.findings import Finding
from plait.spec.job import Job


def rules(
    facts: Mapping[str, Any],
    job: Job,
    environment: Mapping[str, str] | None = None,
    target: str = "Megatron-LM",
    spell: Callable[[str], str | None] = dashed,
) -> list[Finding]:
    """What Megatron says to a job, errors first in the order of its own checks.

    Args:
        facts: of `megatron_arguments.Understood`; {} for a job that comes from elsewhere.
        job: complete, or a stand-in for one whose degrees do not go together.
        environment: environment variables as far as the launch sets them.
        target: who refuses, for messages. spell: how an argument is called in them.
    """
    return []
