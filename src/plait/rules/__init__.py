"""What is illegal about a job, and what is legal and a pity."""

from dataclasses import asdict

from plait.rules import context, experts, legality, links, memory, pipeline, pitfalls, repeats
from plait.rules.neighbour import ERRORS, resolved
from plait.spec.findings import LEVELS, Finding, UserError
from plait.spec.job import Job
from plait.spec.layout import Layout


def check(job: Job, purpose: str = "train") -> list[Finding]:
    """Every finding of every rule: errors first, then warnings and notes.

    Args:
        purpose: "train" adds what only matters to a run on text; see `plait.spec.jobfile`.
    """
    rules = pitfalls.RULES + context.PITFALLS + experts.PITFALLS + pipeline.PITFALLS
    found = errors(job, purpose) + [finding for rule in rules for finding in rule(job)]
    if all(finding.level != "error" for finding in found) and _sound(job.layout):
        # What takes a ledger to say is asked of jobs that have one.
        job, ledger_rules = resolved(job), links.RULES + memory.RULES + repeats.RULES
        found += [finding for rule in ledger_rules for finding in rule(job)]
    return sorted(found, key=lambda f: LEVELS.index(f.level))


def errors(job: Job, purpose: str = "train") -> list[Finding]:
    """What is illegal about a job, read off its numbers; of a draft too (see `draft_job`)."""
    rules = legality.TRAIN_RULES * (purpose == "train") + ERRORS
    return [finding for rule in rules for finding in rule(job)]


def _sound(layout: Layout) -> bool:
    """Whether the degrees go together: those of a draft, which is only asked for more errors, may
    not."""
    try:
        Layout.fill(layout.world, **asdict(layout))
    except UserError:
        return False
    return True
