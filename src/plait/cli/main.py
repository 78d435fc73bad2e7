"""The entry point: finds the command, and turns every way to end into a line and an exit code.

0 done; 1 the answer is no, or a run failed; 2 the question is wrong; 130 Ctrl-C. A command is a
module with `run(argv) -> int`; only the one that is asked for is imported, so that each starts
fast.
"""

import json
import os
import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import version
from typing import NoReturn

from plait.spec.findings import Finding, UserError, closest, error

COMMANDS = {
    "train": "train a model, on this machine or under torchrun or SLURM",
    "explain": "what a layout holds, sends and takes, without running it",
    "convert": "a launch of one system in the words of another",
    "dryrun": "run one rank of a layout without a device, and compare with `explain`",
    "schedule": "a pipeline schedule, simulated and drawn",
    "tables": "the tables of the field, computed for a model",
    "presets": "the models, clusters, schedules and dialects that have names",
}


def main(argv: list[str] | None = None) -> int:
    """Runs a command line; returns its exit code and never raises (unless PLAIT_DEBUG is set)."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        try:
            code = _dispatch(argv)
        except UserError as problem:
            _print_errors(problem.findings, as_json="--json" in argv)
            code = 2
        sys.stdout.flush()
        return code
    except SystemExit as stop:  # argparse after --help
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Who read our output has gone. Python would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except Exception as problem:
        if os.environ.get("PLAIT_DEBUG"):
            raise
        text = " ".join(str(problem).split()) or "no message"
        print(
            f"plait: {type(problem).__name__}: {text} (PLAIT_DEBUG=1 shows where)", file=sys.stderr
        )
        return 1


def script() -> NoReturn:
    """What `plait` and `python -m plait.cli` run: `main`, then the end of the process."""
    code = main()
    if "RANK" in os.environ or "SLURM_PROCID" in os.environ:
        # A rank that a launcher started has done its work. torch's threads are not all joined
        # when an interpreter ends, and one of them may abort the process then.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _dispatch(argv: list[str]) -> int:
    name, *rest = argv or ["--help"]
    if name in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if name == "--version":
        print(f"plait {version('plait')}")
        return 0
    if name not in COMMANDS:
        match = closest(name, COMMANDS)
        kind = "flag before the command" if name.startswith("-") else "command"
        message = f"no such {kind}; commands are {', '.join(COMMANDS)}"
        raise UserError([error(name, name, message, match, "unknown-command")])
    return import_module(f"plait.cli.{name}").run(rest)


def _usage() -> str:
    commands = "\n".join(f"  {name:<10}{words}" for name, words in COMMANDS.items())
    return (
        "usage: plait COMMAND ...\n\n"
        "Split a transformer over many devices, and know beforehand what it costs.\n\n"
        f"{commands}\n\n"
        "plait COMMAND --help says more; plait --version."
    )


def _print_errors(findings: Iterable[Finding], as_json: bool) -> None:
    """All problems: lines for people, or one JSON object and nothing else on stdout."""
    if as_json:
        print(json.dumps({"errors": [f.as_json() for f in findings]}))
        return
    for finding in findings:
        print(finding.line(), file=sys.stderr)
