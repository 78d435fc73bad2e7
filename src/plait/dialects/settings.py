"""What a launch file says, option by option, and what has become of each.

An option that a dialect takes is understood; one that it does not take but its target knows does
not matter to a layout; the rest is unknown. So nothing is dropped silently, and nobody keeps a
list of what was understood that could be wrong.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from plait.spec.build import convert, describe
from plait.spec.findings import Finding, closest, error


@dataclass(frozen=True)
class Setting:
    """An option and its value.

    Attributes:
        name: as the target spells it ("--tensor-model-parallel-size", "zero_optimization.stage").
        value: as written: text, or what YAML and JSON make of it; True for a switch.
        where: in which line or file it stands ("launch.sh:12"); "" where there is but one place.
        open: variables and substitutions in the value that nothing in the file decides.
    """

    name: str
    value: Any
    where: str = ""
    open: tuple[str, ...] = ()


class Settings:
    """The options of a launch. `take` says what an option means; what is never taken is left.

    Args:
        said: in the order in which they stand; of several of one name the last one holds.
        told: dotted path -> value of what a person said beside the file: for these an open
            variable need not be known.
    """

    def __init__(self, said: Iterable[Setting], told: Mapping[str, Any] | None = None):
        self.said: dict[str, Setting] = {}
        for setting in said:
            self.said.pop(setting.name, None)
            self.said[setting.name] = setting
        self.told = told or {}
        self.taken: dict[str, tuple[Any, str]] = {}
        self.defaults: dict[str, tuple[Any, str]] = {}
        self.findings: list[Finding] = []

    def __contains__(self, name: str) -> bool:
        return name in self.said

    def take(self, name: str, kind: Any = str, default: Any = None, means: str = "") -> Any:
        """The value of an option as a `kind` (as `spec.build.convert` knows them: int, float,
        bool, str, tuple[int, ...]), or the target's default.

        Args:
            means: what it is in plait's words: a dotted path ("layout.tp") or a few words.
        """
        setting = self.said.get(name)
        if setting is None:
            if default is not None:
                self.defaults[name] = (default, means)
            return default
        if setting.open:
            self._ask(setting, means)
            self.taken[name] = (setting.value, means)
            return default
        try:
            value = convert(setting.value, kind, name, self.findings)
        except (TypeError, ValueError, OverflowError):
            message = f"{setting.value!r} is not {describe(kind)}"
            self.findings.append(error(self._place(setting), setting.value, message))
            value = default
        self.taken[name] = (value, means)
        return value

    def _ask(self, setting: Setting, means: str) -> None:
        if means in self.told:
            return
        flag = "--" + means.removeprefix("layout.").removeprefix("train.").replace("_", "-")
        ask = f": say {flag}" if "." in means or means in ("model", "ranks") else ""
        message = f"{', '.join(setting.open)} is set outside of the file{ask}"
        asked = error(self._place(setting), setting.value, message, rule="open-variable")
        if asked not in self.findings:
            self.findings.append(asked)

    @staticmethod
    def _place(setting: Setting) -> str:
        return f"{setting.where} {setting.name}".strip()

    def left(
        self, known: Collection[str]
    ) -> tuple[list[Setting], list[tuple[Setting, str | None]]]:
        """What was not taken: options that the target knows, and those that it does not, each
        with the nearest that it does.

        Args:
            known: names of all options of the target that `take` may not have asked for.
        """
        rest = [s for name, s in self.said.items() if name not in self.taken]
        names = {*known, *self.taken, *self.defaults}
        unheeded = [s for s in rest if s.name in names]
        unknown = [(s, closest(s.name, names, 0.75)) for s in rest if s.name not in names]
        return unheeded, unknown
