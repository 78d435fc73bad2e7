"""docs/rules.md: every rule has a row, and its two commands are as the table says."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from plait.cli import arguments
from plait.spec.findings import UserError
from plait.spec.schedule import SCHEDULES

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/rules.md").read_text("utf-8")
ILLEGAL, PITY = re.findall(r"^## (?:Illegal|Legal, and a pity)\n(.*?)(?=^## )", PAGE, re.M | re.S)
_ROW = re.compile(r"^\| `([\w-]+)` \|(?: (\w+) \|)? ([^|]+) \| `([^`]+)` \| `([^`]+)` \|$", re.M)
ROWS = [
    *(("error", *row) for row in _ROW.findall(ILLEGAL)),
    *((row[1], *row) for row in _ROW.findall(PITY)),
]


def found(command: str) -> dict[str, set[str]]:
    """Rule -> levels of what is found about a command's job."""
    name, *words = shlex.split(command)
    given, rest, wrong = arguments.parse(words, arguments.job_parser(name, "", ""))
    purpose = "train" if name == "train" else "plan"
    try:
        _, findings = arguments.load_job(purpose, given, wrong, model=rest[0] if rest else None)
    except UserError as refused:
        findings = refused.findings
    rules: dict[str, set[str]] = {}
    for finding in findings:
        rules.setdefault(finding.rule, set()).add(finding.level)
    return rules


@pytest.mark.parametrize(("level", "rule", "said", "what", "speaks", "silent"), ROWS)
def test_a_rule_speaks_and_is_silent(level, rule, said, what, speaks, silent):
    assert level == (said or "error")
    assert level in found(speaks).get(rule, ())
    assert rule not in found(silent)


def named() -> set[str]:
    """Every id that the sources give a finding: of rules, and of where layouts are filled in."""
    ids: set[str] = set()
    sources = [*(ROOT / "src/plait/rules").glob("*.py"), ROOT / "src/plait/spec/layout.py"]
    # Those of serving have rows in docs/serving.md: see test_serving.py.
    sources = [path for path in sources if path.name != "serving.py"]
    for path in (*sources, ROOT / "src/plait/spec/job.py"):
        tree = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", "")
                position = {"Finding": 1, "_finding": 1, "error": 4, "_with_batch": 1}.get(name)
                given = [k.value for k in node.keywords if k.arg == "rule"]
                if position is not None and len(node.args) > position:
                    given.append(node.args[position])
                ids |= {n.value for n in given if isinstance(n, ast.Constant)}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                ids |= (
                    {node.value} if re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", node.value) else set()
                )
    return ids - set(SCHEDULES) - NO_RULES


#: Words with a dash in those files that are something else.
NO_RULES = {"all-gather", "first-step", "gelu-tanh", "swiglu-clamped"}


def test_every_rule_has_a_row():
    assert {row[1] for row in ROWS} == named()
    assert len(ROWS) > 50


def test_faults_without_a_rule_have_tests():
    section = PAGE.partition("## What needs no rule")[2]
    files = set(re.findall(r"`(test_\w+\.py)`", section))
    assert len(files) > 7
    assert [f for f in files if not (ROOT / "tests" / f).exists()] == []


def test_a_cluster_in_a_file_says_its_domain(tmp_path):
    """The file of the page: nodes of 8, of which 4 devices are joined by fast links."""
    path = tmp_path / "cluster.json"
    path.write_text(re.search(r"```json\n(.*?)```", PAGE, re.S)[1])
    command = f"explain llama3.1-8b --gpus {path} --seq-len 4096 --tp"
    assert "tp-beyond-fast-domain" in found(f"{command} 8")
    assert "tp-beyond-fast-domain" not in found(f"{command} 4")


@pytest.mark.parametrize(
    ("gpus", "most"),
    # 72 in a rack of GB200: 24 heads and 8 KV heads of a model go 8 and 24 ways.
    [("h100:64", 8), ("gb200:144", 24), ("tpu-v5e:256", 24)],
)
def test_the_domain_is_not_the_node(gpus, most):
    shape = "--model.heads 24 --model.hidden 3072 --model.ffn 12288 --seq-len 6144"
    for tp in (1, 2, 4, 8, 24):
        devices = int(gpus.partition(":")[2]) // 24 * 24
        command = f"explain llama3.1-8b --gpus {gpus.partition(':')[0]}:{devices} {shape} --tp {tp}"
        assert ("tp-beyond-fast-domain" in found(command)) == (tp > most), command
