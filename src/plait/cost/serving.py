"""What a serving layout holds and sends, rank by rank."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Serving:
    """How an engine uses its ranks, in roles (degrees are of one engine; all default to 1).

    Attributes:
        engine: the dialect, "vllm".
        attn_tp, attn_dp: tensor and data parallel degree of attention.
        stages: pipeline stages.
        moe_ep, moe_tp: expert parallel degree, and tensor parallel degree inside experts.
        kv_cp: ranks that share the KV cache of a request in decode, token by token.
        q_cp: ranks that share the queries of a prompt.
        replicas: engines that know nothing of each other.
    """

    engine: str
    attn_tp: int = 1
    attn_dp: int = 1
    stages: int = 1
    moe_ep: int = 1
    moe_tp: int = 1
    kv_cp: int = 1
    q_cp: int = 1
    replicas: int = 1
