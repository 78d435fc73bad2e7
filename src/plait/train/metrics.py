"""What a run tells: a progress line for people, a line of JSON a step for programs, a last table.

Only rank 0 tells anything. Progress goes to stderr: one live line on a terminal, elsewhere a plain
line every few seconds. The table goes to stdout, unless that is kept for JSON.
"""

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from plait.cost.context import imbalance
from plait.cost.ledger import StageMemory, TrafficLedger, differences
from plait.report.build import report
from plait.report.numbers import amount
from plait.report.text import render
from plait.spec.findings import UserError, error
from plait.spec.job import Job
from plait.train.routing import Routing
from plait.train.shown import memory_table, traffic_table

#: Seconds between two lines, on a terminal and elsewhere.
LIVE_INTERVAL, PLAIN_INTERVAL = 0.1, 5.0


@dataclass(frozen=True)
class Step:
    """One optimizer step as it is written to the metrics file.

    Attributes:
        step: its number, the first is 0.
        loss: mean over the valid tokens of the global batch, nats.
        grad_norm: of the whole gradient, before clipping.
        tokens_per_second: of all ranks together.
        learning_rate: used in this step.
        seconds: that the step took.
        memory_bytes: the largest that a rank has held so far.
        skipped: nothing was updated (float16 overflow).
        eval_loss: after the step, on samples that are not trained on.
        attention_imbalance: most attention of a cp rank over the mean, where it depends on the
            documents of the step's samples (those of rank 0).
        aux_loss, z_loss, imbalance, dropped: of the mixtures of experts (`train.routing`): what
            the losses beside the cross entropy add to `loss`, which does not hold them.

    What is None was not measured, or there is no such thing, and is left out of the file.
    """

    step: int
    loss: float
    grad_norm: float
    tokens_per_second: float
    learning_rate: float
    seconds: float
    memory_bytes: int
    skipped: bool = False
    eval_loss: float | None = None
    attention_imbalance: float | None = None
    aux_loss: float | None = None
    z_loss: float | None = None
    imbalance: float | None = None
    dropped: float | None = None

    def to_json(self) -> str:
        """One line. JSON has no NaN and no infinity: they become null."""
        fields = {k: v for k, v in asdict(self).items() if v is not None}
        return json.dumps({k: v if math.isfinite(v) else None for k, v in fields.items()})


@dataclass(frozen=True)
class Share:
    """What one rank held and sent: bytes by memory class, and by axis and collective a step."""

    rank: int
    held: Mapping[str, int]
    sent: Mapping[str, int]


class Metrics:
    """Reports a run: `start`, then `step` after each step, `close`, and `summary` at the end.

    On ranks other than 0 all of them do nothing. As a context manager it closes itself.
    """

    def __init__(self, job: Job, rank: int = 0, as_json: bool = False):
        """as_json: stdout belongs to a JSON object, so the summary goes to stderr."""
        self.job, self.telling = job, rank == 0
        self.console = Console(stderr=True)
        self.out = self.console if as_json else Console()
        self.file: IO[str] | None = None
        self.live: Progress | None = None
        self.task = 0
        self.shown = -math.inf  # when the progress was last shown
        self.pace: float | None = None  # seconds of a step, smoothed
        self.routing: Routing | None = None  # of the last step
        self.told: object = None  # the last step's ledger, where it is shown
        self.tokens = job.train.global_batch * job.train.seq_len

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(
        self, kind: type | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, first_step: int = 0) -> None:
        """Opens the metrics file and shows the progress line.

        A run that goes on at `first_step` keeps the lines of earlier steps and drops the rest:
        those steps come again.

        Raises:
            UserError: the file cannot be written.
        """
        if not self.telling:
            return
        if self.job.explain:
            print(render(report(self.job, [])), file=self.console.file, flush=True)
        if self.job.metrics:
            self.file = _open(Path(self.job.metrics), first_step)
        if self.console.is_terminal:
            columns = TextColumn("step"), MofNCompleteColumn(), BarColumn(12)
            self.live = Progress(
                *columns,
                TextColumn("{task.fields[line]}"),
                console=self.console,
                auto_refresh=False,
            )
            self.task = self.live.add_task(
                "", total=self.job.train.steps, completed=first_step, line=""
            )
            self.live.start()
            self.live.refresh()

    def step(
        self,
        step: int,
        loss: float,
        grad_norm: float,
        learning_rate: float,
        seconds: float,
        memory_bytes: int,
        skipped: bool = False,
        eval_loss: float | None = None,
        routing: Routing | None = None,
        documents: Sequence[Sequence[tuple[int, ...]] | None] = (),
    ) -> None:
        """Reports a step that is done.

        documents: of each micro batch of rank 0 the lengths of each sample's documents, or None.
        """
        if not self.telling:
            return
        mixtures, uneven = {}, None
        if self.job.layout.cp > 1 and self.job.data.document_mask:
            uneven = imbalance(self.job, documents)
        if routing is not None:
            mixtures = {
                "aux_loss": routing.aux_loss,
                "z_loss": routing.z_loss,
                "imbalance": routing.imbalance,
                "dropped": routing.dropped if self.job.model.moe.capacity is not None else None,
            }
            self.routing = routing
        rate = self.tokens / max(seconds, 1e-9)
        done = Step(
            step,
            loss,
            grad_norm,
            rate,
            learning_rate,
            seconds,
            int(memory_bytes),
            skipped,
            eval_loss,
            uneven,
            **mixtures,
        )
        if self.file is not None:
            self.file.write(done.to_json() + "\n")
            self.file.flush()
        # The first step is slow (caches, first allocations) and does not count for the rest.
        self.pace = seconds if self.pace is None or step < 2 else 0.9 * self.pace + 0.1 * seconds
        self._show(done)

    def ledger(
        self,
        step: int,
        predicted: TrafficLedger,
        measured: TrafficLedger,
        held: Sequence[StageMemory],
        was_held: Sequence[Mapping[str, Any]],
    ) -> None:
        """Shows what rank 0 sent and held in a step, beside what was predicted: whole where it is
        not as the step before, else in a line.

        held, was_held: its peaks, predicted and measured, a row a moment.
        """
        if not self.telling:
            return
        # What comes and goes differs by when messages are let go.
        states = ("parameters", "gradients", "optimizer")
        now = measured.entries, [[row[name] for name in states] for row in was_held]
        if now == self.told:
            sent = sum(sums.bytes for sums in measured.entries.values())
            most = amount(max(row["total"] for row in was_held))
            same = "as predicted" if not differences(predicted, measured) else "not as predicted"
            words = f"step {step}: sent {amount(sent)} as before, {same}; held {most} at the most"
            self.console.print(words, highlight=False)
            return
        self.told = now
        self.console.print(traffic_table(step, predicted, measured))
        self.console.print(memory_table(step, held, was_held))

    def _show(self, done: Step) -> None:
        steps = self.job.train.steps
        last = done.step + 1 == steps
        now = time.monotonic()
        if now - self.shown < (LIVE_INTERVAL if self.live else PLAIN_INTERVAL) and not (
            last or done.eval_loss is not None
        ):
            return
        self.shown = now
        line = (
            f"loss {done.loss:.4f}  {done.tokens_per_second:,.0f} tokens/s  "
            f"{_clock(self.pace * (steps - done.step - 1))} left  "
            f"{amount(done.memory_bytes)}  norm {done.grad_norm:.3g}  "
            f"lr {done.learning_rate:.2e}" + ("  skipped" if done.skipped else "")
        )
        if done.attention_imbalance is not None:
            line += f"  attention {done.attention_imbalance:.2f}"
        if done.imbalance is not None:
            line += f"  imbalance {done.imbalance:.2f}"
        if done.dropped:
            line += f"  dropped {done.dropped:.1%}"
        if done.eval_loss is not None:
            line += f"  eval {done.eval_loss:.4f}"
        if self.live:
            self.live.update(self.task, completed=done.step + 1, line=line)
            self.live.refresh()
        else:
            print(f"step {done.step + 1}/{steps}  {line}", file=self.console.file, flush=True)

    def close(self) -> None:
        """Leaves the terminal and the file as they should be; may be called twice."""
        if self.live:
            self.live.stop()
            self.live = None
        if self.file:
            self.file.close()
            self.file = None

    def summary(
        self,
        shares: Sequence[Share],
        predicted: str = "",
        checkpoint: str = "",
        command: str = "",
    ) -> None:
        """The end of a run: what each rank held and sent, where to go on.

        Args:
            predicted: what the formulas said of it.
            checkpoint: the last one's folder; "" if there is none.
            command: what a person types to continue from it.
        """
        if not self.telling:
            return
        self.close()
        self.out.print(_table(shares))
        if self.routing is not None:
            self.out.print(_tokens_table(self.routing))
        # Plain prints: a path or a command must come out whole, to be copied.
        if predicted:
            print(f"predicted   {predicted}", file=self.out.file)
        if checkpoint:
            print(f"checkpoint  {checkpoint}", file=self.out.file)
        if command:
            print(f"continue    {command}", file=self.out.file)


def _open(path: Path, first_step: int) -> IO[str]:
    """The metrics file, ready for the line of `first_step`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = _lines_before(path, first_step)
        if first_step and path.exists():
            # Replaced as a whole: a run that is stopped here loses nothing.
            draft = path.with_name(path.name + ".new")
            draft.write_text(kept, encoding="utf-8")
            os.replace(draft, path)
        return open(path, "a" if first_step else "w", encoding="utf-8")
    except OSError as e:
        message = f"{path} cannot be written: {e.strerror}"
        raise UserError([error("metrics", str(path), message)]) from None


def _lines_before(path: Path, first_step: int) -> str:
    """The whole lines of a metrics file whose steps come before `first_step`."""
    if not first_step or not path.exists():
        return ""
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)["step"] < first_step:
                kept.append(line + "\n")
        except (ValueError, TypeError, KeyError):
            continue  # the last line of a run that was killed while it wrote
    return "".join(kept)


def _table(shares: Sequence[Share]) -> Table:
    """Kinds of bytes down, ranks across; neighbours that read the same share a column."""
    shares = sorted(shares, key=lambda share: share.rank)
    columns = [
        (share.rank, (*_column(shares, share, "held"), *_column(shares, share, "sent")))
        for share in shares
    ]
    groups = [(list(g), cells) for cells, g in groupby(columns, key=lambda c: c[1])]
    table = Table()
    table.add_column("bytes of rank")
    for members, _ in groups:
        first, last = members[0][0], members[-1][0]
        name = str(first) if first == last else f"{first}-{last}"
        table.add_column(name, justify="right", no_wrap=True)
    kinds = [*_kinds(shares, "held"), "held at the peak", *_kinds(shares, "sent"), "sent a step"]
    sums = {len(_kinds(shares, "held")), len(kinds) - 1}
    for i, kind in enumerate(kinds):
        style = "bold" if i in sums else None
        table.add_row(kind, *(cells[i] for _, cells in groups), style=style, end_section=i in sums)
    return table


#: A table of tokens per expert has no more mixtures and experts than this, the fullest ones.
MOST_LAYERS, MOST_EXPERTS = 8, 8


def _tokens_table(routing: Routing) -> Table:
    """Tokens per expert in the last step, of all ranks: the mixtures where they are least even,
    and of each its fullest experts."""
    table = Table()
    table.add_column("tokens per expert, last step")
    experts = len(routing.sent[0])
    for name in ("mean", "imbalance", *(("sent", "received") if _drops(routing) else ("sent",))):
        table.add_column(name, justify="right" if name in ("mean", "imbalance") else "left")
    order = sorted(range(len(routing.layers)), key=lambda i: -max(routing.received[i]))
    for i in sorted(order[:MOST_LAYERS]):
        mean = sum(routing.received[i]) / experts
        cells = [_per_expert(routing.sent[i])]
        if _drops(routing):
            cells.append(_per_expert(routing.received[i]))
        worst = max(routing.received[i]) / max(mean, 1e-9)
        table.add_row(f"layer {routing.layers[i]}", f"{mean:,.0f}", f"{worst:.2f}", *cells)
    return table


def _drops(routing: Routing) -> bool:
    return routing.sent != routing.received


def _per_expert(tokens: Sequence[int]) -> str:
    """All of them where they are few, else the fullest and the emptiest."""
    if len(tokens) <= MOST_EXPERTS:
        return " ".join(f"{n:,}" for n in tokens)
    order = sorted(range(len(tokens)), key=lambda e: -tokens[e])
    first = ", ".join(f"{tokens[e]:,} (expert {e})" for e in order[:2])
    return f"{first} ... {tokens[order[-1]]:,} (expert {order[-1]})"


def _kinds(shares: Sequence[Share], side: str) -> list[str]:
    return list(dict.fromkeys(kind for share in shares for kind in getattr(share, side)))


def _column(shares: Sequence[Share], share: Share, side: str) -> list[str]:
    """What one rank held or sent of each kind, then the sum."""
    counts = getattr(share, side)
    cells = [amount(counts[k]) if k in counts else "" for k in _kinds(shares, side)]
    return [*cells, amount(sum(counts.values()))]


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
