"""What was asked: the model, the devices, the batch, and the layout as flags to copy."""

from typing import Any

from plait.report.facts import flags
from plait.report.html.element import Markup, element, join
from plait.report.numbers import amount, count


def question(report: dict[str, Any]) -> Markup:
    facts = element(
        "dl",
        *(join(element("dt", name), element("dd", words)) for name, words in _facts(report)),
        class_="facts",
    )
    if report["serving"]:
        return element(
            "section", element("h2", "What was asked"), facts, aria_label="What was asked"
        )
    # A line does not end within a flag.
    said = (join(" " if i else "", element("span", f)) for i, f in enumerate(flags(report)))
    copy = element(
        "div",
        element("code", *said, id="flags", tabindex=0, aria_label="the layout as flags"),
        element("button", "copy", type="button", id="copy"),
        element("span", role="status", id="copied"),
        class_="flags",
    )
    return element(
        "section", element("h2", "What was asked"), facts, copy, aria_label="What was asked"
    )


def _facts(report: dict[str, Any]) -> list[tuple[str, str]]:
    model, cluster, batch = report["model"], report["cluster"], report["batch"]
    layout = report["layout"]
    size = f"{count(model['parameters'])} parameters"
    if model["active_parameters"] != model["parameters"]:
        size += f", {count(model['active_parameters'])} active"
    facts = [("Model", f"{model['name']}: {size}, {model['layers']} layers")]
    if cluster:
        device = f"{report['world']} x {cluster['device']}, {amount(cluster['memory'])} each"
        facts.append(("Devices", f"{device}, fast links among {cluster['fast_domain']}"))
    if report["serving"]:
        axes = ("tp", "cp", "pp", "ep", "etp", "dcp", "dp_shard", "dp_replicate")
        degrees = [f"{a} {layout[a]}" for a in axes if layout[a] is not None and layout[a] > 1]
        return [
            *facts,
            ("Layout", ", ".join(degrees) or "one rank"),
            ("Requests", f"of up to {batch['seq_len']:,} tokens"),
            ("Numbers", batch["dtype"]),
        ]
    product = ""
    if layout["dp_shard"] is not None:  # None: the degrees of an illegal layout do not multiply
        dp = layout["dp_replicate"] * layout["dp_shard"]
        product = f" = {batch['micro']} in a micro batch x {dp} data parallel"
        product += f" x {batch['accumulation']} accumulation"
    return [
        *facts,
        ("Layout", ", ".join(_degrees(layout))),
        ("Batch", f"{batch['global']:,} samples{product}"),
        (
            "Tokens",
            f"{batch['tokens_per_step']:,} a step = {batch['global']:,} samples x "
            f"{batch['seq_len']:,}",
        ),
        ("Numbers", f"{batch['dtype']}, gradients {batch['grad_dtype']}"),
    ]


def _degrees(layout: dict[str, Any]) -> list[str]:
    axes = ("tp", "cp", "pp", "vpp", "ep", "etp", "dp_replicate", "dp_shard")
    degrees = [f"{a} {layout[a]}" for a in axes if layout[a] is not None and layout[a] > 1]
    ways = [f"ZeRO-{layout['zero']}", f"recompute {layout['recompute']}"]
    if layout["sequence_parallel"]:
        ways.append("sequence parallelism")
    if layout["ulysses"] > 1:
        ways.append(f"ulysses {layout['ulysses']}")
    if (rest := layout["cp"] // layout["ulysses"]) > 1:
        ways.append(f"{layout['cp_method']} {rest}")
    if layout["pp"] > 1:
        ways.append(str(layout["schedule"]))
    return degrees + ways
