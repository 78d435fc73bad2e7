"""The languages that people launch with: each is a module here that reads, checks and writes one.

A dialect is a module with

    VERSION: str                         # of the target: what it is held against
    def read(source, told) -> Launch     # what a launch file says, in plait's words
    def check(launch, job) -> findings   # the target's own rules, on the whole job
    def write(job) -> Written            # the reverse, with a note for what it cannot say

A dialect of serving reads what an engine does with its ranks into `Launch.serving`, takes it in
`write(job, serving)` too, and has

    def settle(fields) -> fields         # a changed launch, with what it derives derived anew

Reading never runs anything, and never stops at the first problem. Nothing here imports torch.
"""

from importlib import import_module
from types import ModuleType

from plait.spec.findings import UserError, closest, error

#: Name -> what it is of, in a person's words.
DIALECTS = {
    "pytorch": "PyTorch mesh scripts",
    "megatron": "Megatron-LM",
    "primus": "Primus",
    "torchtitan": "TorchTitan",
    "deepspeed": "DeepSpeed and Megatron-DeepSpeed",
    "accelerate": "Hugging Face Accelerate",
    "megatron-bridge": "Megatron-Bridge",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "trtllm": "TensorRT-LLM",
}

#: Those of serving.
SERVING = frozenset({"vllm", "sglang", "trtllm"})


def dialect(name: str, where: str = "from") -> ModuleType:
    """The module of a dialect.

    Raises:
        UserError: no dialect is called so (with the nearest).
    """
    if name not in DIALECTS:
        message = f"no dialect is called {name!r}; there are {', '.join(DIALECTS)}"
        raise UserError([error(where, name, message, closest(name, DIALECTS), "unknown-dialect")])
    return import_module(f"plait.dialects.{name.replace('-', '_')}")
