"""What a transformer is: its shape and its choices, without a single tensor."""

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained length.

    Attributes:
        kind: "linear" (Chen et al. 2306.15595), "llama3" (the Llama 3.1 rule) or "yarn"
            (Peng et al. 2309.00071).
        factor: length after over length before.
        original: positions that the model was trained with.
        low, high: "llama3": low_freq_factor, high_freq_factor; "yarn": beta_slow, beta_fast.
        attention_factor: "yarn": scale of cos and sin; derived from `factor` when None.
        truncate: "yarn": the bounds of the ramp are rounded outwards to whole dims.
    """

    kind: str
    factor: float
    original: int = 8192
    low: float = 1.0
    high: float = 4.0
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class MoE:
    """Mixture of experts in place of the MLP.

    Attributes:
        experts: routed experts; `topk` of them serve a token; `shared` more serve every token.
        ffn: width of one expert. `shared_ffn`: width of the shared experts together
            (shared * ffn when None).
        first_dense: leading layers that keep the dense MLP.
        every: one layer in `every` is a mixture (1: all).
        bias: biases in the experts. router_bias: a bias for each expert in the router.
        score: what the router's logits become, "softmax" or "sigmoid" (DeepSeek-V3).
        topk_first: softmax over the chosen logits only (gpt-oss), not over all before the choice.
        normalize: the weights of a token's experts are divided by their sum.
        scaling: the weights are multiplied by it.
        groups, topk_groups: experts stand in equal groups, and only those of the best
            `topk_groups` groups may be chosen (DeepSeek-V2, 2405.04434 section 2.2.2).
        group_score: a group is as good as its best expert, "max" (DeepSeek-V2), or its best
            two together, "top2" (DeepSeek-V3).
        correction: a bias for each expert that decides who is chosen but not how much it weighs.
            Not learned by gradients: after a step it falls by `correction_speed` where an expert
            had more than the mean of the global batch's tokens, and rises where it had fewer
            (2408.15664).
        aux_loss: coefficient of the loss that balances experts (0: none). aux_form: over which
            tokens the shares of the experts are taken: "sequence", "batch" (a micro batch) or
            "global" (the step so far).
        z_loss: coefficient of the squared log-sum-exp of the logits (2202.08906).
        capacity: an expert takes at most capacity * tokens * topk / experts of a sequence's
            tokens, rounded up (None: dropless). drop: which of them it leaves out, the latest
            ("position") or those it weighs least ("probability").
    """

    experts: int
    topk: int
    ffn: int
    shared: int = 0
    shared_ffn: int | None = None
    first_dense: int = 0
    every: int = 1
    bias: bool = False
    router_bias: bool = False
    score: str = "softmax"
    topk_first: bool = False
    normalize: bool = True
    scaling: float = 1.0
    groups: int = 1
    topk_groups: int = 1
    group_score: str = "max"
    correction: bool = False
    correction_speed: float = 0.001
    aux_loss: float = 0.0
    aux_form: str = "sequence"
    z_loss: float = 0.0
    capacity: float | None = None
    drop: str = "position"


@dataclass(frozen=True)
class MLA:
    """Multi-head latent attention (DeepSeek-V2, 2405.04434 section 2.1).

    Attributes:
        q_rank: rank of the query's latent (None: the query is projected directly).
        kv_rank: rank of the latent that keys and values share.
        nope_dim, rope_dim, v_dim: head sizes without rotation, with rotation, and of values.
    """

    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    q_rank: int | None = None


@dataclass(frozen=True)
class Model:
    """The shape of a decoder-only transformer.

    Attributes:
        name: how people call it.
        layers, hidden, heads, kv_heads, head_dim, ffn, vocab: sizes; `ffn` per matrix.
        seq: longest sequence that it is meant for, tokens.
        mlp: "swiglu", "geglu" (gated; geglu in the tanh form), "swiglu-clamped" (gated; gpt-oss:
            both inputs clamped at 7, sigmoid of 1.702 times the gate) or "gelu", "gelu-tanh".
        norm: "rms" or "layer"; `norm_eps` its epsilon.
        norm_offset: weights are stored as w and used as 1 + w (Gemma).
        norm_at: "input" (pre-norm), "output" (OLMo 2) or "both" (Gemma 2 and 3).
        qk_norm: None, "head" (over each head, Qwen3) or "full" (over all heads, OLMo 2).
        positions: "rope", "learned", "alibi" or "none".
        rope_theta, rope_scaling: the rotary embedding.
        rope_local_theta: theta of windowed layers where it differs (Gemma 3).
        tied: output head and token embedding are one parameter.
        embed_scale: embeddings are multiplied by sqrt(hidden) (Gemma).
        embed_norm: a norm follows the embedding (BLOOM).
        qkv_bias, o_bias, mlp_bias: biases of the linear maps.
        dropout: probability, after the embedding and each residual branch.
        window: positions that attention looks back on, its own included (None: all).
        full_every: with a window, one layer in `full_every` sees everything (None: none does).
        attention_scale: scores are multiplied by it (1 / sqrt(head_dim) when None).
        attention_softcap, logit_softcap: tanh soft caps (Gemma 2), None without.
        sinks: a learned sink per head (gpt-oss).
        moe, mla: mixture of experts, multi-head latent attention.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    vocab: int
    ffn: int
    kv_heads: int
    head_dim: int
    seq: int = 2048
    mlp: str = "swiglu"
    norm: str = "rms"
    norm_eps: float = 1e-5
    norm_offset: bool = False
    norm_at: str = "input"
    qk_norm: str | None = None
    positions: str = "rope"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rope_local_theta: float | None = None
    tied: bool = False
    embed_scale: bool = False
    embed_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    dropout: float = 0.0
    window: int | None = None
    full_every: int | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    sinks: bool = False
    moe: MoE | None = None
    mla: MLA | None = None

    @staticmethod
    def of(name: str, **given: Any) -> "Model":
        """A model from the sizes that a person states; kv_heads, head_dim and ffn are derived.

        kv_heads defaults to heads, head_dim to hidden / heads, ffn to 4 x hidden.
        """
        heads = given["heads"]
        derived = {
            "kv_heads": heads,
            "head_dim": given["hidden"] // heads,
            "ffn": 4 * given["hidden"],
        }
        return Model(name=name, **(derived | {k: v for k, v in given.items() if v is not None}))

    @property
    def gated(self) -> bool:
        """The MLP has a gate beside its up projection."""
        return self.mlp in ("swiglu", "geglu", "swiglu-clamped")

    def is_moe(self, layer: int) -> bool:
        """Whether a layer's MLP is a mixture of experts."""
        moe = self.moe
        return (
            moe is not None
            and layer >= moe.first_dense
            and (layer - moe.first_dense) % moe.every == moe.every - 1
        )

    def is_full_attention(self, layer: int) -> bool:
        """Whether a layer's attention sees every earlier position."""
        return self.window is None or (
            self.full_every is not None and layer % self.full_every == self.full_every - 1
        )

    def with_layers(self, layers: int) -> "Model":
        """The same model, shallower or deeper."""
        return replace(self, layers=layers)
