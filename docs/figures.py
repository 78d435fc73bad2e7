"""Draws the figures of docs/strategies/ as SVG: `python docs/figures.py`.

Those of pipeline schedules are what `plait schedule --svg` draws; the others are drawn here.

Plain shapes and text, no fonts or scripts from elsewhere. Each figure brings its own ground, light
or dark as the reader's system is, so that it can be read on any page.
"""

from dataclasses import replace
from pathlib import Path

from plait.schedules.build import build
from plait.schedules.simulate import Times, simulate
from plait.schedules.svg import svg
from plait.spec.job import Job, Train
from plait.spec.layout import Layout
from plait.spec.presets import model as preset
from plait.spec.sequence import imbalance, split
from plait.trace.dryrun import measure

HERE = Path(__file__).parent / "strategies"

#: Role -> colour on a light and on a dark ground.
COLOURS = {
    "ground": ("#ffffff", "#15191f"),
    "ink": ("#1d2430", "#e6e9ee"),
    "faint": ("#64707f", "#9aa5b3"),
    "line": ("#b7c0cb", "#46505d"),
    "weights": ("#8db8e8", "#2f5f93"),
    "grads": ("#f0b072", "#8f5a1f"),
    "states": ("#a5cf9b", "#3f7236"),
    "tokens": ("#cdbce6", "#5d4a80"),
    "wire": ("#c2453a", "#f0867c"),
}


class Figure:
    """An SVG that is drawn from the top left, in pixels."""

    def __init__(self, width: int, height: int, title: str):
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, role: str, text: str = "") -> None:
        """A filled box with a line of text in its middle."""
        self.parts.append(
            f'<rect class="{role}" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3"/>'
        )
        if text:
            self.text(x + w / 2, y + h / 2 + 4, text)

    def frame(self, x: float, y: float, w: float, h: float) -> None:
        """A box without filling."""
        self.parts.append(
            f'<rect class="frame" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="5"/>'
        )

    def text(self, x: float, y: float, text: str, role: str = "ink", at: str = "middle") -> None:
        """A line of text; `at` is start, middle or end."""
        for raw, safe in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
            text = text.replace(raw, safe)
        self.parts.append(
            f'<text class="{role}" x="{x:g}" y="{y:g}" text-anchor="{at}">{text}</text>'
        )

    def arrow(self, x: float, y: float, to_x: float, to_y: float, both: bool = False) -> None:
        """A line with a head at its end, or at both."""
        start = ' marker-start="url(#head)"' if both else ""
        self.parts.append(
            f'<line class="arrow" x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}"'
            f'{start} marker-end="url(#head)"/>'
        )

    def __str__(self) -> str:
        def style(dark: int) -> str:
            fill = "".join(f".{role}{{fill:{pair[dark]}}}" for role, pair in COLOURS.items())
            line, wire = COLOURS["line"][dark], COLOURS["wire"][dark]
            return (
                f"{fill}.frame{{fill:none;stroke:{line}}}.arrow{{stroke:{wire};stroke-width:1.6}}"
            )

        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto-start-reverse"><path class="wire" d="M0 0L8 4L0 8z"/>'
            "</marker>"
        )
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" aria-label="{self.title}">',
            f"<title>{self.title}</title>",
            "<style>text{font:13px system-ui,sans-serif}"
            f"{style(0)}@media(prefers-color-scheme:dark){{{style(1)}}}</style>",
            f"<defs>{head}</defs>",
            f'<rect class="ground" width="{self.width}" height="{self.height}" rx="8"/>',
            *self.parts,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def data() -> Figure:
    """Four ranks, each with the whole model and its own samples."""
    f = Figure(720, 250, "Data parallelism: each rank has the whole model and its own samples")
    f.text(20, 28, "Each rank holds everything and sees its own samples.", "faint", "start")
    for r in range(4):
        x = 20 + 175 * r
        f.frame(x, 44, 155, 134)
        f.text(x + 77, 64, f"rank {r}")
        f.box(x + 12, 74, 131, 22, "tokens", f"samples {4 * r} to {4 * r + 3}")
        f.box(x + 12, 100, 131, 22, "weights", "all weights")
        f.box(x + 12, 126, 131, 22, "states", "all optimizer states")
        f.box(x + 12, 152, 131, 20, "grads", "all gradients")
        f.arrow(x + 77, 176, x + 77, 206, both=True)
    f.box(
        20,
        208,
        680,
        26,
        "line",
        "all-reduce: gradients are summed, bucket by bucket, during backward",
    )
    return f


def zero() -> Figure:
    """What one of four ranks holds in each stage."""
    f = Figure(720, 268, "ZeRO: what each of four ranks holds in stages 0 to 3")
    kinds = (
        ("weights", "weights", 3),
        ("grads", "gradients", 2),
        ("states", "optimizer states", 1),
    )
    for i, (role, name, _) in enumerate(kinds):
        f.box(150 + 190 * i, 14, 16, 16, role)
        f.text(172 + 190 * i, 27, name, at="start")
    messages = (
        "all-reduce gradients, once a step",
        "reduce-scatter gradients, all-gather weights, once a step",
        "reduce-scatter gradients in each micro batch, all-gather once",
        "reduce-scatter, and all-gather each layer twice, in each micro batch",
    )
    for stage, message in enumerate(messages):
        y = 46 + 54 * stage
        f.text(20, y + 16, f"ZeRO {stage}", at="start")
        for r in range(4):
            left = 96 + 152 * r
            f.frame(left, y, 144, 26)
            for i, (role, _, shard_from) in enumerate(kinds):
                x = left + 4 + 46 * i
                if stage < shard_from:
                    f.box(x, y + 4, 44, 18, role)
                else:
                    f.box(x + 11 * r, y + 4, 11, 18, role)
        f.text(96, y + 42, message, "faint", "start")
    return f


def tensor() -> Figure:
    """One branch of a layer on two tensor-parallel ranks, with sequence parallelism."""
    f = Figure(720, 280, "Tensor and sequence parallelism: one branch of a layer on two ranks")
    f.text(20, 28, "One branch (an MLP; attention likewise) on two tp ranks", "faint", "start")
    stages = (
        (20, 96, "tokens", ("norm", "rows 0 to T/2", "rows T/2 to T")),
        (196, 104, "weights", ("column-parallel", "gate, up: half 0", "gate, up: half 1")),
        (310, 104, "tokens", ("activation", "f/2 columns", "f/2 columns")),
        (424, 104, "weights", ("row-parallel", "down: half 0", "down: half 1")),
        (604, 96, "tokens", ("stream", "rows 0 to T/2", "rows T/2 to T")),
    )
    for x, w, role, (head, *ranks) in stages:
        f.text(x + w / 2, 60, head)
        for r, text in enumerate(ranks):
            f.box(x, 74 + 52 * r, w, 40, role, text)
    for x, to, name, mirror in (
        (118, 194, "all-gather", ("all-gather,", "reduce-scatter")),
        (530, 602, "reduce-scatter", ("all-gather",)),
    ):
        for y in (94, 146):
            f.arrow(x, y, to, y)
        f.arrow(x, 100, to, 140)
        f.arrow(x, 140, to, 100)
        f.text((x + to) / 2, 194, name, "wire")
        for i, line in enumerate(mirror):
            f.text((x + to) / 2, 220 + 16 * i, line, "wire")
    f.text(20, 194, "forward", "faint", "start")
    f.text(20, 220, "backward", "faint", "start")
    f.text(367, 194, "nothing is sent", "faint")
    f.text(367, 220, "nothing is sent", "faint")
    f.text(20, 264, "T tokens of a micro batch, f the width of the MLP.", "faint", "start")
    return f


def context() -> Figure:
    """A sample of 16 positions on four ranks, cut in three ways."""
    f = Figure(720, 278, "Context parallelism: how the positions of a sample lie on four ranks")
    roles = ("weights", "grads", "states", "tokens")
    for r, role in enumerate(roles):
        f.box(150 + 140 * r, 14, 16, 16, role)
        f.text(172 + 140 * r, 27, f"rank {r}", at="start")
    ways = (
        ("contiguous", "ulysses 4", split((16,), 4, "contiguous"), 4),
        ("head-tail", "a ring of 4", split((16,), 4), 1),
        ("groups of two", "ulysses 2 in a ring of 2", split((16,), 4, ulysses=2), 2),
    )
    for i, (name, used, cut, ulysses) in enumerate(ways):
        y = 52 + 62 * i
        f.text(20, y + 14, name, at="start")
        f.text(20, y + 32, used, "faint", "start")
        for rank in range(4):
            for position in cut.positions(rank):
                f.box(190 + 32 * position, y, 30, 24, roles[rank], str(position))
        most = f"most work over the mean: {imbalance(cut.joined(ulysses)):.3g}"
        if ulysses == 4:
            most += f"; in a ring it would be {imbalance(cut):.3g}"
        f.text(190, y + 42, most, "faint", "start")
    f.text(20, 246, "A query sees the keys up to its own position.", "faint", "start")
    what = (
        "Ranks that exchange heads see each other's positions, of some heads: their work is even."
    )
    f.text(20, 264, what, "faint", "start")
    return f


#: Sizes of rings in the figure of their memory, and what each rank has.
RINGS, POSITIONS = (1, 2, 4, 8, 16), 8192


def ring_memory() -> Figure:
    """Dry runs: what a rank holds beside model states at its fullest, as ring and sample grow."""
    f = Figure(720, 286, "Memory of a rank as the ring grows with the sample")
    ways = (("ring", "weights"), ("all-gather", "grads"))
    for i, (way, role) in enumerate(ways):
        f.box(190 + 150 * i, 14, 16, 16, role)
        f.text(212 + 150 * i, 27, way, at="start")
    held = {way: [_beside_states(cp, way) for cp in RINGS] for way, _ in ways}
    unit = 150 / max(map(max, held.values()))
    for i, cp in enumerate(RINGS):
        for j, (way, role) in enumerate(ways):
            n, x = held[way][i], 50 + 132 * i + 46 * j
            f.box(x, 210 - n * unit, 42, n * unit, role)
            f.text(x + 21, 204 - n * unit, f"{n / 2**30:.2f}")
        f.text(94 + 132 * i, 228, f"cp {cp}: {cp * POSITIONS // 1024}K")
    what = "GiB beside model states. Two layers of Llama 3.1 8B with a vocabulary of 8,192, "
    f.text(20, 254, f"{what}bfloat16,", "faint", "start")
    f.text(20, 272, f"{POSITIONS:,} positions a rank, full recompute.", "faint", "start")
    return f


def _beside_states(cp: int, method: str) -> int:
    layout = Layout.fill(cp, cp=cp, cp_method=method, recompute="full")
    train = Train(seq_len=cp * POSITIONS, dtype="bfloat16", global_batch=1, accumulation=1)
    model = replace(preset("llama3.1-8b").with_layers(2), vocab=8192)
    rows = measure(Job(model, layout, train)).memory
    return max(row.activations + row.logits + row.buffers for row in rows)


#: The schedules that the page on pipelines shows.
PIPELINES = (
    "gpipe",
    "1f1b",
    "interleaved-1f1b",
    "looped-bfs",
    "zb-h1",
    "zb-h2",
    "zb-auto",
    "zbv",
    "v-half",
    "v-min",
    "dualpipe",
    "dualpipev",
)


def expert() -> Figure:
    """Two choices of each token travel to the ranks that have their experts."""
    f = Figure(720, 262, "Expert parallelism: tokens travel to the ranks of their experts and back")
    f.text(20, 28, "ep 4: eight experts on four ranks, tokens go to theirs and come back.",
           "faint", "start")  # fmt: skip
    for r in range(4):
        x = 20 + 175 * r
        f.frame(x, 44, 155, 206)
        f.text(x + 77, 64, f"rank {r}")
        f.box(x + 12, 74, 131, 24, "tokens", f"tokens {4 * r} to {4 * r + 3}")
        f.box(x + 12, 104, 131, 24, "weights", "router")
        f.box(x + 12, 196, 62, 40, "weights", f"expert {2 * r}")
        f.box(x + 81, 196, 62, 40, "weights", f"expert {2 * r + 1}")
    for r in range(4):
        for to in ((r + 1) % 4, (3 * r + 2) % 4):
            f.arrow(97 + 175 * r, 130, 97 + 175 * to, 193, both=True)
    return f


def pipeline(name: str) -> str:
    """A schedule of four ranks and eight micro batches; F, I and W take the same time."""
    table = build(name, 4, 8)
    return svg(table, simulate(table, Times.even(table)))


def figures() -> dict[str, str]:
    """File name in docs/strategies/ -> SVG."""
    drawn = {"data.svg": str(data()), "zero.svg": str(zero()), "tensor.svg": str(tensor())}
    drawn |= {"expert.svg": str(expert())}
    drawn |= {"context.svg": str(context()), "context-memory.svg": str(ring_memory())}
    return drawn | {f"pipeline-{name}.svg": pipeline(name) for name in PIPELINES}


if __name__ == "__main__":
    for name, text in figures().items():
        (HERE / name).write_text(text, "utf-8")
