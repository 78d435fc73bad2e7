"""What a dialect makes of a launch file, and of a job."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from plait.cost.serving import Serving
from plait.dialects.settings import Setting, Settings
from plait.spec.findings import Finding
from plait.spec.model import Model

#: When a target finds out.
AT_START = "at start"
FIRST_STEP = "in the first step"


@dataclass(frozen=True)
class Told:
    """What a person says beside the launch file.

    Attributes:
        given: dotted path -> value or its text, of every flag.
        world: ranks, where --ranks or --gpus say so.
        model: where --model says so.
    """

    given: Mapping[str, Any] = field(default_factory=dict)
    world: int | None = None
    model: Model | None = None


@dataclass(frozen=True)
class Launch:
    """What a launch file says.

    Attributes:
        fields: dotted path -> value, exactly what a job file would say: "model" (a preset's
            name) or "model.layers", ..., "ranks", "layout.tp", "train.seq_len", ...
        settings: every option and what became of it.
        known: names of options that the target knows and that do not matter to a layout.
        findings: what the file alone shows to be wrong, and what was assumed.
        environment: environment variables that decide a rule of the target, as far as the file
            sets them.
        serving: of a serve command; None for training.
        facts: what `check` needs of the target's own that a job does not hold.
    """

    fields: dict[str, Any]
    settings: Settings
    known: Collection[str] = ()
    findings: list[Finding] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    serving: Serving | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def unheeded(self) -> list[Setting]:
        return self.settings.left(self.known)[0]

    def unknown(self) -> list[tuple[Setting, str | None]]:
        return self.settings.left(self.known)[1]


@dataclass(frozen=True)
class Written:
    """A job in the words of a target.

    Attributes:
        files: name -> text; the first is the one to start with.
        notes: what the target cannot say, and what it would do instead.
    """

    files: dict[str, str]
    notes: list[Finding] = field(default_factory=list)


def refused(
    target: str, rule: str, when: str, message: str, value: Any = None, **suggest: Any
) -> Finding:
    """The target would not run this.

    Args:
        when: `AT_START` or `FIRST_STEP`.
        suggest: dotted path with "__" for "." -> value that would put it right
            (layout__etp=1).
    """
    mended = {path.replace("__", "."): v for path, v in suggest.items()}
    where = next(iter(mended), "")
    return Finding("error", rule, f"{target} refuses it {when}: {message}", where, value, mended)


def changed(target: str, rule: str, message: str, value: Any = None, **suggest: Any) -> Finding:
    """The target would run something else than what was said, or costs something by its own
    doing."""
    mended = {path.replace("__", "."): v for path, v in suggest.items()}
    where = next(iter(mended), "")
    return Finding("warning", rule, f"{target}: {message}", where, value, mended)


def note(target: str, rule: str, message: str, value: Any = None) -> Finding:
    """Something to know: a default, an assumption, what a target cannot express."""
    return Finding("note", rule, f"{target}: {message}", "", value)
