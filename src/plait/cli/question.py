"""What a command that answers with a REPORT was asked: about a job, said in flags, in a job file
or in the words of another system."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from plait.cli.arguments import FLAGS
from plait.cost.serving import Serving, on, on_devices
from plait.dialects import SERVING, dialect
from plait.dialects.launch import Launch, Told, Written
from plait.dialects.nearest import nearest_legal, of_training, smallest_world
from plait.dialects.source import Source, source_of
from plait.rules import serving as serving_rules
from plait.rules.mend import mended
from plait.spec import presets
from plait.spec.findings import LEVELS, Finding, UserError, error
from plait.spec.job import Job
from plait.spec.jobfile import Draft, draft


@dataclass(frozen=True)
class Question:
    """A job to be explained, and what there is to say of it already.

    Attributes:
        job: a stand-in where its degrees do not go together (see `spec.jobfile.Draft`).
        findings: of plait's rules.
        draft: how far the job could be read.
        own: findings of the dialect: what its target would do.
        source: REPORT's `source`, of a launch that another system understands.
        launch: what the dialect made of it.
    """

    job: Job
    findings: list[Finding]
    draft: Draft
    own: list[Finding] = field(default_factory=list)
    source: dict[str, Any] | None = None
    launch: Launch | None = field(default=None, repr=False)

    @property
    def illegal(self) -> bool:
        return any(f.level == "error" for f in (*self.own, *self.findings))

    @property
    def serving(self) -> Serving | None:
        """How an engine uses the ranks; None for training."""
        told = self.launch.serving if self.launch else None
        if told is None:
            return None
        # Of degrees that do not go together, what the launch itself says of the ranks.
        roles = on(told, self.job.layout) if self.draft.degrees else told
        return on_devices(roles, self.job.cluster)

    def report(self) -> dict[str, Any]:
        """The REPORT. What only the target refuses is computed all the same, but fits nowhere."""
        from plait.report.build import report

        world = None if self.draft.degrees else self.draft.world
        return self.completed(report(self.job, self.findings, world, self.serving))

    def written(self, name: str, job: Job | None = None) -> Written:
        """The job in the words of a dialect, with what the launch chose beside its layout where
        it serves.

        Args:
            job: another than the one that was asked about.
        """
        job, told = job or self.job, self.launch.serving if self.launch else None
        if name in SERVING and told is not None:
            return dialect(name).write(job, on(told, job.layout))
        return dialect(name).write(job)

    def completed(self, answer: dict[str, Any]) -> dict[str, Any]:
        """A REPORT of the job, with what the dialect has to say: what it says of a rule
        ("megatron-expert-grid") stands for the rule itself ("expert-grid")."""
        if self.source is None:
            return answer
        said = {f.rule.partition("-")[2] for f in self.own if f.level == "error"}
        found = [asdict(f) for f in self.own]
        found += [f for f in answer["findings"] if f["rule"] not in said]
        found.sort(key=lambda f: LEVELS.index(f["level"]))
        fits = False if self.illegal else answer["fits"]
        return answer | {"findings": found, "fits": fits, "source": self.source}


def asked(
    given: Mapping[str, Any],
    findings: Sequence[Finding],
    file: str | None = None,
    model: str | None = None,
) -> Question:
    """The question that flags and a job file ask.

    Args:
        given: as `cli.arguments.parse` returns it. findings: what is wrong with the arguments.

    Raises:
        UserError: the question has no meaning. A layout that is illegal has one.
    """
    overrides = _overrides(given)
    findings = list(findings)
    if model is not None and "model" in overrides:
        message = f"two models: {model} and --model {overrides['model']}"
        findings.append(error("model", overrides["model"], message, model))

    def make(changes: Mapping[str, Any]) -> Draft:
        return draft("plan", file, overrides | changes, model=model)

    return _question(make, findings)


def _question(
    make: Callable[[Mapping[str, Any]], Draft],
    wrong: Sequence[Finding],
    judge: Callable[[Job], list[Finding]] = of_training,
) -> Question:
    """
    Args:
        make: the draft with some fields changed. wrong: what is wrong with the arguments.
        judge: what the rules say of a job.
    """

    def errors(made: Draft) -> list[Finding]:
        """What is illegal beside what the draft says itself."""
        found = judge(made.job) if made.job is not None else []
        return [f for f in found if f.level == "error"]

    def ask(changes: Mapping[str, Any]) -> list[Finding]:
        made = make(changes)
        return made.findings + errors(made)

    made = make({})
    if made.job is None:
        raise UserError(_once([*wrong, *made.findings]))
    # A draft is good for finding what else is illegal, and for nothing more.
    found = errors(made) if made.findings else judge(made.job)
    found = mended(made.job, [*made.findings, *found], ask)
    # A file that cannot be read, or a word that means nothing, is a wrong question, not a layout
    # that is illegal.
    meaningless = [f for f in found if f.rule in ("unreadable", "words")]
    if wrong or meaningless or not made.understood:
        raise UserError(_once([*wrong, *(f for f in found if f.level == "error")]))
    return Question(made.job, _once(found), made)


def _once(found: Sequence[Finding]) -> list[Finding]:
    """Without repetitions: two places may find the same."""
    return list({f.line(): f for f in found}.values())


def launched(
    name: str, words: Sequence[str], given: Mapping[str, Any], findings: Sequence[Finding]
) -> Question:
    """The question that a launch file or command of another system asks.

    Args:
        name: of the dialect. words: a file's name, or the command.

    Raises:
        UserError: it cannot be read, or leaves open what decides the layout.
    """
    wrong = list(findings)
    overrides = _overrides(given)
    language = source = None
    try:
        language = dialect(name)
        source = source_of(list(words)) if words else None
        source = source and replace(source, variables=_variables(given.get("set", ())))
    except UserError as problem:
        wrong += problem.findings
    if not words:
        wrong.append(error("from", name, "a launch file or a command must follow"))
    told = _told(overrides)
    if language is None or source is None:
        raise UserError(wrong)
    launch = language.read(source, told)
    fields = _merged(launch.fields, overrides)
    wrong += [f for f in launch.settings.findings if f.level == "error"]
    notes = [f for f in launch.settings.findings if f.level != "error"]
    if not fields.keys() & {"ranks", "gpus"}:
        fields["ranks"], assumed = smallest_world(fields)
        notes.append(assumed)
    if "model.layers" in fields and "model" not in fields and "train.seq_len" in fields:
        # A model that is given by its sizes is meant for what it is trained on.
        fields.setdefault("model.seq", fields["train.seq_len"])
    asked_for = any(f.where == "model" or f.message.endswith("say --model") for f in wrong)
    if not asked_for and not any(key.partition(".")[0] == "model" for key in fields):
        message = f"{source.name} does not say which model: --model NAME (see `plait presets`)"
        wrong.append(error("model", None, message, rule="no-model"))

    settle = getattr(language, "settle", dict)

    def make(changes: Mapping[str, Any]) -> Draft:
        # What a target derives of a changed degree, the ranks of a server too, is no error of it.
        made = draft("plan", None, settle(fields | changes) if changes else fields)
        # That there is no model has been said, in the words of the launch.
        return replace(made, findings=[f for f in made.findings if f.rule != "no-model"])

    judge = _judge(launch)
    question = replace(_question(make, wrong, judge), launch=launch)
    own = [*launch.findings, *language.check(launch, question.job), *notes]
    own += _strangers(launch, name)
    about = _about(name, language.VERSION, launch, source.name)
    refusals = [f for f in own if f.level == "error"]
    if refusals or question.illegal:
        again = _again(question, name)
        legal = nearest_legal(fields, refusals, again, settle)
        about["legal"] = (question.written(name, legal).files if legal else None) or None
    return replace(question, own=own, source=about)


def _judge(launch: Launch) -> Callable[[Job], list[Finding]]:
    """What plait's rules say of a job: those of training, or those of serving."""
    serving = launch.serving
    if serving is None:
        return of_training
    return lambda job: serving_rules.check(job, on_devices(on(serving, job.layout), job.cluster))


def _again(question: Question, name: str) -> Callable[[Job], list[Finding]]:
    """What is wrong with a job as its target would be told it: it is written, and read back."""
    language = dialect(name)
    # What an engine does beside the layout is put right by writing it.
    first_of_all = of_training if question.launch.serving is None else lambda _: []

    def both(job: Job) -> list[Finding]:
        found = [f for f in first_of_all(job) if f.level == "error"]
        if found:
            return found
        written = question.written(name, job)
        if not written.files:  # the target cannot say it: its notes have why
            return list(written.notes)
        first, text = next(iter(written.files.items()))
        told = Told(world=job.layout.world, model=job.model)
        launch = language.read(Source(text, first, Path(first), written.files), told)
        said = as_said(launch, job)
        return [*_judge(launch)(said), *launch.findings, *language.check(launch, said)]

    return both


def as_said(launch: Launch, job: Job) -> Job:
    """The job as it was written: what the target cannot say is not in it any more."""
    fields = {k: v for k, v in launch.fields.items() if k.partition(".")[0] != "model"}
    sizes = {name: getattr(job.model, name) for name in ("layers", "hidden", "heads", "vocab")}
    model = {f"model.{name}": value for name, value in sizes.items()}
    made = draft("plan", None, fields | model | {"ranks": job.layout.world})
    if made.job is None or made.findings:
        return job
    return replace(made.job, model=job.model, cluster=job.cluster)


def _variables(said: Sequence[str]) -> dict[str, str]:
    """Environment variables, each said as NAME=VALUE.

    Raises:
        UserError: one is said in another way.
    """
    pairs = [text.partition("=") for text in said]
    message = "an environment variable is said as NAME=VALUE"
    wrong = [text for text, (name, equals, _) in zip(said, pairs, strict=True)
             if not (equals and name.isidentifier())]  # fmt: skip
    if wrong:
        raise UserError(error("set", text, message, rule="arguments") for text in wrong)
    return {name: value for name, _, value in pairs}


def _overrides(given: Mapping[str, Any]) -> dict[str, Any]:
    return {path: text for path, text in given.items() if path in FLAGS.values()}


def _told(overrides: Mapping[str, Any]) -> Told:
    """What the flags say that a dialect may need; what is wrong with them is said elsewhere."""
    world = model = None
    ranks = str(overrides.get("ranks", ""))
    with suppress(UserError):
        world = int(ranks) if ranks.isascii() and ranks.isdecimal() and len(ranks) < 8 else None
        world = presets.cluster(overrides["gpus"]).devices if "gpus" in overrides else world
    with suppress(UserError):
        model = presets.model(overrides["model"]) if "model" in overrides else None
    return Told(overrides, world, model)


def _merged(said: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the file, under those of the flags: a model or a number of ranks that is
    named replaces what the file says of it."""
    kept = dict(said)
    if "model" in overrides:
        kept = {k: v for k, v in kept.items() if k != "model" and not k.startswith("model.")}
    if overrides.keys() & {"ranks", "gpus"}:
        kept.pop("ranks", None)
        kept.pop("gpus", None)
    return kept | dict(overrides)


def _strangers(launch: Launch, name: str) -> list[Finding]:
    """A warning for each option that the target does not know."""
    found = []
    for setting, nearest in launch.unknown():
        hint = f"; did you mean {nearest}?" if nearest else ""
        message = f"{setting.name} is no option that {name} is known to have{hint}"
        place = setting.where
        found.append(
            Finding("warning", "unknown-option", f"{message}{f' ({place})' if place else ''}",
                    setting.name, setting.value, {setting.name: nearest} if nearest else {})
        )  # fmt: skip
    return found


def _about(name: str, version: str, launch: Launch, file: str) -> dict[str, Any]:
    """REPORT's `source`: what became of every option."""
    settings = launch.settings

    def line(setting: Any, **more: Any) -> dict[str, Any]:
        return {"name": setting.name, "value": setting.value, "where": setting.where} | more

    return {
        "dialect": name,
        "version": version,
        "file": file,
        "understood": [
            line(settings.said[key]) | {"means": means}
            for key, (_, means) in settings.taken.items()
        ],
        "unheeded": [line(setting) for setting in launch.unheeded()],
        "unknown": [line(setting, nearest=near) for setting, near in launch.unknown()],
        "defaults": [
            {"name": key, "value": value, "means": means}
            for key, (value, means) in settings.defaults.items()
        ],
        "environment": dict(launch.environment),
        "legal": None,
    }
