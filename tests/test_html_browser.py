"""The page in a real browser, out of a file and without a network: `pytest -m browser`."""

import os
import shutil

import pytest

from grids import expert_traffic_grid, traffic_grid
from plait.report.build import report
from plait.report.html import page
from plait.report.numbers import amount
from plait.report.timeline import drawn
from plait.rules import check
from plait.spec.jobfile import read_job

pytestmark = pytest.mark.browser

CASES = {
    "experts": {"model": "mixtral-8x7b", "gpus": "h100:64", "tp": 2, "pp": 4, "ep": 8,
                "dp_replicate": 2, "seq_len": 2048, "accumulation": 8},
    "large": {"model": "llama3.1-405b", "gpus": "h100:16384", "tp": 8, "pp": 16,
              "seq_len": 8192, "global_batch": 16384},
}  # fmt: skip


@pytest.fixture(scope="module")
def chromium():
    """A Chromium of the system, or else playwright's own."""
    from playwright.sync_api import sync_playwright

    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=arguments
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """(job, REPORT, address of its page)."""
    given = dict(CASES[request.param])
    job = read_job("plan", model=given.pop("model"), gpus=given.pop("gpus"), overrides=given)
    said = report(job, check(job, "plan"))
    file = tmp_path_factory.mktemp("page") / "a.html"
    file.write_text(page(said, drawn(job)), "utf-8")
    return job, said, file.as_uri()


@pytest.fixture
def visit(chromium, case):
    """Opens the page; whatever it complains of or asks for is an error."""
    *_, address = case
    problems, contexts = [], []

    def run(width=1280, scheme="light", media="screen", scripts=True):
        context = chromium.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=scheme,
            java_script_enabled=scripts,
            offline=True,
        )
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: problems.append(message.text))
        tab.on("pageerror", lambda problem: problems.append(str(problem)))
        tab.on("request", lambda r: problems.append(r.url) if r.url != address else None)
        tab.emulate_media(media=media, color_scheme=scheme)
        tab.goto(address)
        return tab

    yield run
    for context in contexts:
        context.close()
    assert problems == []


def members(text):
    """Ranks that words name: (those said, the last one)."""
    if "-" in text:
        first, last = map(int, text.split("-"))
        return list(range(first, last + 1)), last
    shown, _, last = text.partition(" ... ")
    ranks = [int(n) for n in shown.split(", ")]
    return ranks, int(last) if last else ranks[-1]


def holds(tab, job, said, rank):
    """What stands beside the grids is of this rank."""
    dense, expert = traffic_grid(job.layout), expert_traffic_grid(job.layout)
    made_of = {"fsdp": ("ulysses", "cp", "dp_shard"), "world": dense.axes}
    stage = rank // (said["world"] // job.layout.pp)
    tables = tab.locator("table.sent:visible")
    assert tables.count() == 1
    assert str(stage) in tables.get_attribute("data-stages").split()
    assert f"rank {rank}:" in tab.locator("#place").inner_text()
    rows = tables.locator("tr[data-axis]")
    seen = set()
    for i in range(rows.count()):
        row = rows.nth(i)
        axis = row.get_attribute("data-axis")
        seen.add(axis)
        grid = expert if axis in ("etp", "ep", "edp") else dense
        group = sorted(grid.group(rank, *made_of.get(axis, (axis,))))
        shown, last = members(row.locator("[data-group]").inner_text())
        assert shown == group[: len(shown)]
        assert last == group[-1]
        own = [r for r in said["traffic"] if (r["stage"], r["axis"]) == (stage, axis)]
        cells = row.locator("td").all_inner_texts()
        assert cells[1:3] == [amount(sum(r[k] for r in own)) for k in ("bytes", "wire_bytes")]
    assert {r["axis"] for r in said["traffic"] if r["stage"] == stage} <= seen


def test_hover_a_rank(visit, case):
    job, said, _ = case
    tab = visit()
    holds(tab, job, said, 0)
    for rank in (5, 3, said["world"] - 1):
        for grid in tab.locator("table.grid").all():
            grid.locator(f"td[data-rank='{rank}']").hover()
            holds(tab, job, said, rank)


def test_the_groups_of_a_rank_are_marked_in_the_grids(visit, case):
    job, *_ = case
    tab = visit()
    rank = 3
    tab.locator(f"table.grid td[data-rank='{rank}']").first.hover()
    layout = job.layout
    grids = {
        "dense": (traffic_grid(layout), {"tp": ("tp",), "fsdp": ("ulysses", "cp", "dp_shard"),
                                         "dp_replicate": ("dp_replicate",), "pp": ("pp",)}),
        "expert": (expert_traffic_grid(layout), {"etp": ("etp",), "ep": ("ep",), "edp": ("edp",),
                                                 "dp_replicate": ("replicas",), "pp": ("pp",)}),
    }  # fmt: skip
    for table in tab.locator("table.grid").all():
        grid, axes = grids[table.get_attribute("data-grid")]
        groups = {name: set(grid.group(rank, *parts)) for name, parts in axes.items()}
        marks = table.locator("td[data-rank]").evaluate_all(
            "cells => cells.map(c => [Number(c.dataset.rank), c.className])"
        )
        for other, mark in marks:
            names = {f"a-{name}" for name, group in groups.items() if other in group}
            assert (mark == "self") == (other == rank)
            assert mark in (names or {""}) or other == rank, (other, mark)


def test_by_keyboard_alone(visit, case):
    job, said, _ = case
    tab = visit()
    grid = tab.locator("table.grid").first
    grid.locator("td[tabindex='0']").focus()
    row = grid.locator("tbody tr").first.locator("td[data-rank]").count()
    for key, rank in (("ArrowRight", 1), ("ArrowDown", 1 + row), ("ArrowLeft", row), ("Home", 0)):
        tab.keyboard.press(key)
        holds(tab, job, said, rank)
    tab.keyboard.press("End")
    holds(tab, job, said, said["world"] - 1)
    # Any rank, also one that is not drawn; what is no rank changes nothing.
    tab.locator("#rank").fill(str(said["world"] // 2 - 3))
    holds(tab, job, said, said["world"] // 2 - 3)
    for nonsense in (said["world"], -1, 1.5):
        tab.locator("#rank").fill(str(nonsense))
        holds(tab, job, said, said["world"] // 2 - 3)


def test_a_click_holds_a_rank(visit, case):
    job, said, _ = case
    tab = visit()
    cell = "table.grid td[data-rank='{}']"
    tab.locator(cell.format(5)).first.click()
    tab.locator(cell.format(7)).first.hover()
    holds(tab, job, said, 5)
    tab.locator(cell.format(5)).first.click()
    tab.locator(cell.format(7)).first.hover()
    holds(tab, job, said, 7)


def test_copy_the_flags(visit):
    tab = visit()
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.locator("#copy").click()
    tab.wait_for_function("document.getElementById('copied').textContent !== ''")
    assert tab.locator("#copied").inner_text() == "copied"
    copied = tab.evaluate("navigator.clipboard.readText()")
    assert copied == tab.locator("#flags").inner_text()


@pytest.mark.parametrize("width", [360, 768, 1280, 1920])
def test_nothing_sticks_out_of_the_window(visit, width):
    tab = visit(width)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    for section in tab.locator("section").all():
        box = section.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width


#: The page's dark text, for a light ground.
INK = "rgb(27, 34, 44)"

_CONTRAST = """() => {
  const rgb = (text) => {
    const ctx = Object.assign(document.createElement("canvas"), {width: 1, height: 1})
      .getContext("2d");
    ctx.fillStyle = text; ctx.fillRect(0, 0, 1, 1);
    return [...ctx.getImageData(0, 0, 1, 1).data];
  };
  const ground = (node) => {
    for (let n = node; n; n = n.parentElement) {
      const c = rgb(getComputedStyle(n).backgroundColor);
      if (c[3] === 255) return c;
    }
    throw new Error("no ground");
  };
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => v / 255)
      .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const bad = [];
  for (const node of document.querySelectorAll("main *:not(svg):not(svg *)")) {
    const own = [...node.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !node.checkVisibility() || node.matches("script, style")) continue;
    const [a, b] = [light(rgb(getComputedStyle(node).color)), light(ground(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) bad.push(`${node.tagName} ${node.className}: ${ratio.toFixed(2)}`);
  }
  return [...new Set(bad)];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_on_its_ground(visit, scheme):
    """WCAG 2.2, 1.4.3: a contrast of 4.5 at least."""
    tab = visit(scheme=scheme)
    tab.locator("table.grid td[data-rank='3']").first.hover()
    ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert sum(map(int, ground[4:-1].split(","))) > 600 or scheme == "dark"
    assert sum(map(int, ground[4:-1].split(","))) < 120 or scheme == "light"
    assert tab.evaluate(_CONTRAST) == []


def test_without_scripts_all_that_is_said_is_there(visit, case):
    job, *_ = case
    tab = visit(scripts=False)
    tables = tab.locator("table.sent:visible")
    stages = {s for t in tables.all() for s in t.get_attribute("data-stages").split()}
    assert stages == {str(stage) for stage in range(job.layout.pp)}
    assert tab.locator(".script:visible").count() == 0


def test_on_paper(visit):
    tab = visit(media="print", scheme="dark")
    # Paper is white whatever the screen is.
    assert tab.evaluate("getComputedStyle(document.querySelector('h1')).color") == INK
    assert tab.locator("#copy:visible").count() == 0
    pdf = tab.pdf()
    assert pdf.startswith(b"%PDF")
    # Opening the details for paper leaves them closed on screen.
    assert tab.locator("details[open]").count() == 0
