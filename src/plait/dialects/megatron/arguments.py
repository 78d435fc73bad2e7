"""Megatron's arguments, wherever they stand, in plait's words: the room that every dialect of the
family builds on (Megatron-LM, Primus, Megatron-Bridge, Megatron-DeepSpeed).

Arguments go by the names of Megatron's namespace: "tensor_model_parallel_size". How a launch file
spells them is the caller's: `spell` makes the one of the other.

    understood = understand(settings, told, spell=lambda name: f"model.{name}", world=64)
    understood.fields     # "layout.tp", "model.layers", ... as a job file says them
    understood.facts      # for `validation.rules(facts, job, environment, target, spell)`
    understood.findings   # what was assumed, what plait has no word for
    arguments, notes = writer.arguments_of(job)   # the reverse
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from plait.dialects.launch import Told, note
from plait.dialects.megatron.names import dashed, flags_of, underscored
from plait.dialects.settings import Settings
from plait.spec.build import convert
from plait.spec.findings import Finding, error

#: Fields that one argument says by itself, in the same unit.
DIRECT = frozenset(
    "layout.tp layout.pp layout.cp layout.ep layout.etp layout.micro_batch layout.dp_replicate "
    "layout.sequence_parallel train.global_batch train.seq_len".split()
)


@dataclass
class Arguments:
    """A launch's settings, by Megatron's names.

    What a person says beside the file (`settings.told`, by dotted path) is stronger: an argument
    that means "layout.tp" has the value of --tp.

    Attributes:
        settings: of the launch.
        spell: name of an argument, or of a flag that sets it ("disable_bias_linear") -> as the
            settings spell it; None where they have no word for it.
        target: whose arguments these are, for messages.
        values: argument -> value, of every argument that was asked for.
        given: arguments that the launch says itself.
        findings: notes on what was assumed.
    """

    settings: Settings
    spell: Callable[[str], str | None] = dashed
    target: str = "Megatron-LM"
    values: dict[str, Any] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)

    def take(
        self,
        name: str,
        kind: Any = str,
        default: Any = None,
        means: str = "",
        needed: bool = True,
    ) -> Any:
        """The value of an argument as a `kind`; null is the same as nothing said.

        Args:
            means: as `Settings.take` has it.
            needed: an open variable in it is asked for. What is of a model is asked for as a
                model, and not at all where a person says one.
        """
        value = default
        for place, _ in self._places(name):
            if not self._silent(place, means, needed):
                value = self.settings.take(place, kind, default, self._asked(place, means))
                self.given.add(name)
        if name not in self.given and default is not None:
            self._filled(name, default, means)
        value = self._told(means, kind, value)
        self.values[name] = value
        return value

    def switch(self, name: str, default: bool = False, means: str = "") -> bool:
        """Whether an argument is on; several flags may switch it on or off, the last one holds."""
        value = default
        for place, off in self._places(name):
            if not self._silent(place, means):
                said = self.settings.take(place, bool, None, self._asked(place, means))
                value = value if said is None else said != off
                self.given.add(name)
        if name not in self.given:
            off = any(flag.off and flag.name == self.spell(name) for flag in flags_of(name))
            self._filled(name, default != off, means)
        value = self._told(means, bool, value)
        self.values[name] = value
        return value

    def numbers(self, name: str, means: str = "", needed: bool = True) -> tuple[int, ...] | None:
        """A list of whole numbers: of words, of YAML, "8,4" or "(128,0)"."""
        words = self.words(name, means, needed)
        if not words:
            return None
        text = " ".join(word.strip("()[] ").replace(",", " ") for word in words)
        parts = re.sub(r"(?<=\d)_(?=\d)", "", text).split()  # 2_000_000
        if not all(p.lstrip("-").isascii() and p.lstrip("-").isdecimal() for p in parts):
            self._wrong(name, words, "whole numbers")
            return None
        self.values[name] = tuple(int(p[:18]) for p in parts)
        return self.values[name]

    def words(self, name: str, means: str = "", needed: bool = True) -> tuple[str, ...]:
        """A list of words, however it is written; () where nothing is said."""
        value = self.take(name, None, None, means, needed)
        if value is None or value is True:
            words: tuple[str, ...] = ()
        elif isinstance(value, list | tuple):
            words = tuple(str(v) for v in value)
        else:
            words = tuple(str(value).split())
        self.values[name] = words
        return words

    def told(self, means: str) -> bool:
        """Whether a person says this beside the file."""
        return means in self.settings.told

    def forget(self, means: str, names: str) -> bool:
        """Where a person says a field, what the launch says of it in several arguments no longer
        counts.

        Args:
            names: of arguments, parted by spaces.
        """
        if not self.told(means):
            return False
        self.values |= dict.fromkeys(names.split())
        return True

    def note(self, rule: str, message: str, value: Any = None) -> None:
        self.findings.append(note(self.target, rule, message, value))

    def spelled(self, name: str) -> str:
        """An argument as a person would write it."""
        return self.spell(name) or name

    def _places(self, name: str) -> Iterator[tuple[str, bool]]:
        """The settings of an argument that the launch has, in order, and whether each switches
        it off."""
        candidates = {self.spell(underscored(flag.name)): flag.off for flag in flags_of(name)}
        candidates.setdefault(self.spell(name), False)
        for place in list(self.settings.said):
            if place in candidates:
                yield place, candidates[place]

    def _silent(self, place: str, means: str, needed: bool = True) -> bool:
        """Whether a setting is understood, but says nothing: YAML's null, and a variable that
        nobody needs to know."""
        setting = self.settings.said[place]
        if means.startswith("model") and "model" in self.settings.told:
            needed = False
        if setting.value is None or (setting.open and not needed):
            self.settings.taken[place] = (setting.value, means)
            return True
        return False

    def _asked(self, place: str, means: str) -> str:
        is_model = means.startswith("model.") and self.settings.said[place].open
        return "model" if is_model else means

    def _filled(self, name: str, default: Any, means: str) -> None:
        """A default is shown where it decides something: a field of plait's, and none of a model
        that a person names in place of the launch's."""
        place, table = self.spell(name), means.partition(".")[0]
        own = table == "model" and "model" not in self.settings.told
        if place and (own or table in ("layout", "train")):
            self.settings.defaults[place] = (default, means)

    def _told(self, means: str, kind: Any, value: Any) -> Any:
        if means not in DIRECT or means not in self.settings.told:
            return value
        try:
            return convert(self.settings.told[means], kind, means, [])
        except (TypeError, ValueError, OverflowError):
            return value

    def _wrong(self, name: str, value: Any, kinds: str) -> None:
        shown = " ".join(map(str, value))
        message = f"{shown!r} is not a list of {kinds}"
        self.settings.findings.append(error(self.spelled(name), shown, message))
        self.values[name] = None


@dataclass(frozen=True)
class Understood:
    """What Megatron's arguments say.

    Attributes:
        fields: dotted path -> value, as `Launch.fields`.
        facts: argument -> value of everything that was read, defaults filled in, and "given":
            the arguments that the launch says itself, "world": ranks where they are known.
        findings: what was assumed, and what plait has no word for.
    """

    fields: dict[str, Any]
    facts: dict[str, Any]
    findings: list[Finding]


def understand(
    settings: Settings,
    told: Told,
    spell: Callable[[str], str | None] = dashed,
    world: int | None = None,
    target: str = "Megatron-LM",
) -> Understood:
    """What a launch's settings say of model, layout, batch and training.

    Args:
        settings: with what they are told (`told.given`), spelled the caller's way.
        spell: see `Arguments.spell`.
        world: ranks, as the launch says them; `told.world` is stronger.
    """
    from plait.dialects.megatron.layout import layout_fields
    from plait.dialects.megatron.model import model_fields
    from plait.dialects.megatron.train import train_fields

    arguments = Arguments(settings, spell, target)
    world = told.world or world
    model = model_fields(arguments, told.model)
    fields = model | layout_fields(arguments, told.model) | train_fields(arguments, world)
    if "model.layers" in fields and fields.get("train.seq_len"):
        # A model is meant for what it is trained on, where nothing says more.
        fields.setdefault("model.seq", fields["train.seq_len"])
    if world is not None:
        fields["ranks"] = world
    for_rules(arguments)
    facts = arguments.values | {"given": frozenset(arguments.given), "world": world}
    return Understood(fields, facts, arguments.findings)


def for_rules(arguments: Arguments) -> None:
    """Ask for what only the rules need to know."""
    from plait.dialects.megatron.validation_options import ON, SWITCHES, WORDS

    means = "one of the target's rules"
    for name in (*SWITCHES, *ON):
        arguments.switch(name, name in ON, means)
    for name, (kind, default) in WORDS.items():
        arguments.take(name, kind, default, means, False)
