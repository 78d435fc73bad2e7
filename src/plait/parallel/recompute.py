"""Activation recompute: what backward needs is computed again instead of kept.

Chen et al. 1604.06174. "full" keeps only each layer's input; "selective" recomputes the modules
named, one by one. Random choices are functions of counters (`models/random.py`), so nothing has
to be remembered for them.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from plait.parallel.collectives import Scope
from plait.spec.layout import Layout


def apply_recompute(module: nn.Module, layout: Layout, scope: Scope) -> None:
    """Wraps the forward of layers, or of their modules, in place.

    Only `forward` is wrapped: hooks on the module stay outside, so ZeRO-3 gathers weights once
    before a layer's backward and the recomputation finds them there.
    """
    for layer in module.layers.values():
        if layout.recompute == "full":
            layer.forward = _recomputed(layer.forward, scope)
        for name, child in layer.named_children():
            kind = "norm" if name.endswith("norm") else {"moe": "mlp"}.get(name, name)
            if kind in layout.recomputed:
                child.forward = _recomputed(child.forward, scope)


def _recomputed(forward: Callable, scope: Scope) -> Callable:
    def contexts() -> tuple[Any, Any]:
        return nullcontext(), scope.during("recompute")

    def run(*args: Any) -> Any:
        return checkpoint(
            forward,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            determinism_check="none",
            context_fn=contexts,
        )

    return run
