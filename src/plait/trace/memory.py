"""Measured memory: every storage that one rank's program holds, by class, moment by moment.

Works on a live run and under fake tensors alike: what counts is the size that a storage says it
has. Storages are seen where torch dispatches the operation that makes them, and are gone when
Python's last reference is.
"""

import weakref
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from plait.cost.ledger import MEMORY_CLASSES, StageMemory
from plait.cost.tape import Tape
from plait.train.program import Program

#: Moment of a step by the phase of the program. From head to loss and back it is "loss".
MOMENTS = {
    "forward": "forward",
    "loss": "loss",
    "backward": "backward",
    "recompute": "backward",
    "norm": "optimizer",
    "optimizer": "optimizer",
}
#: Collectives whose whole side is a buffer: position of that tensor among the arguments.
_WHOLE_SIDE = {"_allgather_base_": 0, "_reduce_scatter_base_": 1}
#: Messages whose tensors are buffers on the ring, which passes on blocks that nobody keeps.
_MESSAGES = ("send", "recv_")


class MemoryTracker(TorchDispatchMode):
    """Follows the memory of a program while it is entered.

        with MemoryTracker(program) as tracker:
            program.step(...)
        tracker.rows()

    What the program already holds is counted from the start. Not counted: the allocator's
    rounding, and what kernels and collectives use inside.

    Attributes:
        current: class -> bytes now, without what ZeRO-3 has gathered.
        peaks: moment -> class -> bytes, when their sum was largest in that moment; since the last
            cut, if there was one.
        before: class -> bytes at the last cut, or at the beginning.
    """

    def __init__(self, program: Program):
        super().__init__()
        self.program, self.scope = program, program.mesh.scope
        self.buckets = program.engine.buckets
        self.scattered = [b for b in self.buckets if b.zero >= 2]
        self.current = dict.fromkeys(MEMORY_CLASSES, 0)
        self.peaks: dict[str, dict[str, int]] = {}
        self.last = False  # whether the step is in its last moment
        self.known: dict[int, tuple[str, int]] = {}  # storage -> (class, bytes)

    # -- entering and leaving

    def __enter__(self) -> "MemoryTracker":
        dtypes = self.buckets[0].dtypes
        split = dtypes.compute != dtypes.master
        for b in self.buckets:
            if b.zero == 3:
                # Its size changes under way: `_gathered` reads it, `_see` must not count it.
                self.known[b.full.untyped_storage()._cdata] = ("gathered", 0)
            else:
                self._see(b.full, "parameters")
            self._see(b.master, "optimizer" if split else "parameters")
            self._see(b.grads, "gradients")
        for state in self.program.optimizer.state.values():
            for value in state.values():
                self._see(value, "optimizer")
        self.hooks = [
            module.head.register_forward_pre_hook(self._watch_head)
            for module in self.program.modules.values()
            if module.head is not None
        ]
        self.before = self._held()
        self._note()
        return super().__enter__()

    def cut(self) -> Tape:
        """What has happened since the last cut, on a tape that began with nothing."""
        tape, before, now = Tape(), self.before, self._held()
        tape.now = {kind: n - before[kind] for kind, n in now.items()}
        tape.total = sum(tape.now.values())
        for moment, peak in self.peaks.items():
            tape.peaks[moment] = {kind: n - before[kind] for kind, n in peak.items()}
            tape.most[moment] = sum(tape.peaks[moment].values())
        self.before, self.peaks = now, {}
        return tape

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        for hook in self.hooks:
            hook.remove()

    def _watch_head(self, _: nn.Module, args: tuple) -> None:
        """The gradient that leaves the head is an activation's."""
        if args[0].requires_grad:
            args[0].register_hook(lambda grad: self._move(grad, "activations"))

    # -- following

    def __torch_dispatch__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.namespace == "c10d":
            name = function.__name__.partition(".")[0]
            if name in _WHOLE_SIDE:
                whole = args[_WHOLE_SIDE[name]]
                self._move(whole, "buffers")
                if any(b.whole is whole for b in self.scattered):  # gradients, and what arrives
                    self._move(args[0], "buffers")
            elif name in _MESSAGES and self.scope.axis.name == "cp":
                for tensor in args[0]:
                    self._move(tensor, "buffers")
        elif any(made.alias_info is None for made in function._schema.returns):
            # Only what is new: a view of, or a write to, an unknown storage belongs to whoever
            # made it out of sight, as gloo does in its own threads.
            kind = "activations"
            if self.scope.phase in ("norm", "optimizer"):
                kind = "optimizer"
            elif self.scope.in_head:
                kind = "logits"
            for value in tree_iter(result):
                self._see(value, kind)
        self._note()
        return result

    def _see(self, value: Any, kind: str) -> None:
        if not isinstance(value, Tensor):
            return
        storage = value.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known[key] = (kind, size)
            self.current[kind] += size
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        kind, size = self.known.pop(key)
        self.current[kind] -= size

    def _move(self, value: Tensor, kind: str) -> None:
        key = value.untyped_storage()._cdata
        before, size = self.known.get(key, ("", 0))
        if before in ("activations", "logits"):
            self.current[before] -= size
            self.current[kind] += size
            self.known[key] = (kind, size)

    def _note(self) -> None:
        """Takes the new sizes into the peak of the moment."""
        for b in self.scattered:
            if b.whole is not None:
                self._move(b.whole, "buffers")
        now = self._held()
        moment = "loss" if self.scope.in_head else MOMENTS[self.scope.phase]
        # A step ends with its optimizer: what is tidied up after it is not a forward's.
        self.last = self.last or moment == "optimizer"
        moment = "optimizer" if self.last else moment
        # The later of two equals: a buffer is known for one only after it has been made.
        if sum(now.values()) >= sum(self.peaks.get(moment, {}).values()):
            self.peaks[moment] = now

    def _held(self) -> dict[str, int]:
        """Class -> bytes now."""
        gathered = sum(
            b.full.untyped_storage().nbytes() for b in self.scattered if b.zero == 3 and b.gathered
        )
        return self.current | {"gathered": gathered}

    # -- the answer

    def rows(self) -> list[dict[str, Any]]:
        """The peak of each moment that was seen, as `StageMemory` in a dict."""
        stage = self.program.mesh.coordinate["pp"]
        return [
            asdict(StageMemory(stage, moment, **self.peaks[moment], total=sum(held.values())))
            for moment in dict.fromkeys(MOMENTS.values())
            if (held := self.peaks.get(moment))
        ]
