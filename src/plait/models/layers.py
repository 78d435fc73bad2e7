"""The parts of a transformer that are small functions of one tensor.

Norms, rotary embedding, gated product, dropout, cross entropy. Where torch's own takes more
passes over memory than the arithmetic needs, the backward is written out by hand.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from plait.models import random
from plait.spec.model import Model, RopeScaling


def fan_out(x: Tensor, *linears: nn.Module) -> tuple[Tensor, ...]:
    """Several linear maps of one input: [T, in] -> a tuple of [T, out_i]."""
    return tuple(linear(x) for linear in linears)


# ------------------------------------------------------------------------------------------
# Norms


def accurate(x: Tensor) -> Tensor:
    """x in float32 where its own dtype is too coarse for sums of squares."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


class _RMSNorm(torch.autograd.Function):
    """y = w x / rms(x). Keeps x, w and one number a row.

    With g the gradient of y, r = 1 / rms(x) and n the width:
    dw = sum over rows of g x r,  dx = r w g - x r^3 (g x . w) / n.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = accurate(x)
        rstd = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        rstd = rstd.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        return (wide * rstd).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, rstd = ctx.saved_tensors
        n = x.shape[-1]
        wide, g, w = accurate(x), accurate(grad), weight.to(rstd.dtype)
        product = (g * wide).reshape(-1, n)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            along = torch.mv(product, w).view(rstd.shape)
            scale = along.mul_(rstd * rstd * rstd).mul_(-1 / n)
            dx = (g * w).mul_(rstd).addcmul_(wide, scale).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dw = torch.mv(product.t(), rstd.view(-1)).to(weight.dtype)
        return dx, dw, None


class RMSNorm(nn.Module):
    """Root mean square norm (1910.07467) over the last dim: [..., size] -> [..., size].

    bfloat16 and float16 inputs are normalised and scaled in float32 and rounded once. With
    `offset` the scale is 1 + weight.
    """

    def __init__(self, size: int, eps: float, offset: bool = False):
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.zeros(size) if offset else torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        weight = 1.0 + accurate(self.weight) if self.offset else self.weight
        return _RMSNorm.apply(x, weight, self.eps)


class LayerNorm(nn.Module):
    """Layer norm (1607.06450) over the last dim; with `offset` the scale is 1 + weight."""

    def __init__(self, size: int, eps: float, offset: bool = False):
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.zeros(size) if offset else torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        weight = 1.0 + self.weight if self.offset else self.weight
        return F.layer_norm(x, weight.shape, weight, self.bias, self.eps)


def norm(model: Model, size: int) -> nn.Module:
    """The model's kind of norm over `size` features."""
    kind = {"rms": RMSNorm, "layer": LayerNorm}[model.norm]
    return kind(size, model.norm_eps, model.norm_offset)


# ------------------------------------------------------------------------------------------
# Rotary embedding


def rope_frequencies(
    dim: int, theta: float, scaling: RopeScaling | None, device: torch.device | None = None
) -> Tensor:
    """Radians a position for each pair of features, [dim / 2] float64 (2104.09864).

    `scaling` stretches them: "linear" (2306.15595), "llama3" (Meta's Llama 3.1 reference code)
    or "yarn" (2309.00071 section 3.2, with the bounds rounded outwards as its authors' code has
    it, unless `truncate` says otherwise).
    """
    pair = torch.arange(dim // 2, dtype=torch.float64, device=device)
    frequency = theta ** (-2.0 / dim * pair)
    if scaling is None:
        return frequency
    slow = frequency / scaling.factor
    if scaling.kind == "linear":
        return slow
    if scaling.kind == "llama3":
        # Turns over the trained length: above `high` kept, below `low` stretched, between mixed.
        turns = scaling.original * frequency / (2 * math.pi)
        keep = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0.0, 1.0)
    else:
        assert scaling.kind == "yarn", scaling.kind

        def pair_with(turns: float) -> float:
            ratio = scaling.original / (turns * 2 * math.pi)
            return dim * math.log(ratio) / (2 * math.log(theta))

        first, last = pair_with(scaling.high), pair_with(scaling.low)
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        keep = 1.0 - ((pair - first) / max(last - first, 1e-3)).clamp(0.0, 1.0)
    return keep * frequency + (1.0 - keep) * slow


def rope_tables(
    positions: Tensor, dim: int, theta: float, scaling: RopeScaling | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [S, dim], for positions [S]; computed in float64, rounded once.

    Both halves of a row belong to the same angles; the first half of sin is negated.
    YaRN's temperature scales both: 0.1 ln(factor) + 1 where the model states none.
    """
    angle = torch.outer(positions.double(), rope_frequencies(dim, theta, scaling, positions.device))
    scale = 1.0
    if scaling is not None and scaling.kind == "yarn":
        scale = scaling.attention_factor
        if scale is None:
            scale = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    cos, sin = (angle.cos() * scale).to(dtype), (angle.sin() * scale).to(dtype)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


class _Rotate(torch.autograd.Function):
    """Turns each pair (x_i, x_{i + dim/2}) by its angle; the backward turns it back."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        return _turn(grad, *ctx.saved_tensors, -1), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    # Whole rows of memory: operations on halves take twice as long.
    partner = x.roll(x.shape[-1] // 2, -1)
    return (x * cos[:, None]).addcmul_(partner, sin[:, None], value=sign)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the rotate-half convention of Hugging Face.

    Args:
        x: [B, S, heads, dim]. cos, sin: [S, dim] as `rope_tables` makes them.
    """
    return _Rotate.apply(x, cos, sin)


# ------------------------------------------------------------------------------------------
# Activations of the MLP


def activate(kind: str, x: Tensor) -> Tensor:
    """The nonlinearity of an MLP without a gate, by the model's name for it."""
    return F.gelu(x, approximate=_GELU[kind])


#: Gemma's gate has the tanh form.
_GELU = {"gelu": "none", "gelu-tanh": "tanh", "geglu": "tanh"}


class _Gated(torch.autograd.Function):
    """act(gate) * up. Keeps gate and up only; act(gate) is made again in the backward.

    That costs nothing in time (a fresh tensor is as dear as the arithmetic), and one
    [T, ffn] tensor a layer less is kept.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, kind: str, gate: Tensor, up: Tensor) -> Tensor:
        ctx.kind = kind
        ctx.save_for_backward(gate, up)
        return _gate(kind, gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[None, Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_up = _gate(ctx.kind, gate).mul_(grad)
        inner = grad * up
        if ctx.kind == "swiglu":
            return None, torch.ops.aten.silu_backward(inner, gate), grad_up
        form = _GELU[ctx.kind]
        return None, torch.ops.aten.gelu_backward(inner, gate, approximate=form), grad_up


def _gate(kind: str, x: Tensor) -> Tensor:
    return F.silu(x) if kind == "swiglu" else F.gelu(x, approximate=_GELU[kind])


class _Clamped(torch.autograd.Function):
    """(up + 1) gate sigmoid(1.702 gate) of clamped inputs (gpt-oss). Keeps gate and up only."""

    @staticmethod
    def forward(ctx: FunctionCtx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        g = gate.clamp(max=_LIMIT)
        return up.clamp(-_LIMIT, _LIMIT).add_(1).mul_(g * torch.sigmoid(g * _ALPHA))

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        g = gate.clamp(max=_LIMIT)
        s = torch.sigmoid(g * _ALPHA)
        grad_up = (grad * g).mul_(s).masked_fill_(up.abs() > _LIMIT, 0)
        slope = s + _ALPHA * g * s * (1 - s)
        grad_gate = up.clamp(-_LIMIT, _LIMIT).add_(1).mul_(grad).mul_(slope)
        return grad_gate.masked_fill_(gate > _LIMIT, 0), grad_up


#: Of "swiglu-clamped".
_LIMIT, _ALPHA = 7.0, 1.702


def gated(kind: str, gate: Tensor, up: Tensor) -> Tensor:
    """The product of an MLP with a gate: silu(gate) * up ("swiglu"), gelu(gate) * up ("geglu") or
    gpt-oss's ("swiglu-clamped")."""
    if kind == "swiglu-clamped":
        return _Clamped.apply(gate, up)
    return _Gated.apply(kind, gate, up)


# ------------------------------------------------------------------------------------------
# Dropout


class Dropout(nn.Module):
    """Dropout whose mask depends on what is dropped, not on who holds it.

    Attributes:
        p: probability.
        seed: of the run, set by whoever trains.
        site: this module's path in the model, set by the model.
    """

    def __init__(self, p: float):
        super().__init__()
        self.p, self.seed, self.site = p, 0, ""

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        """x [T, H], rows int64 [T] (each token's global number) -> [T, H]."""
        if self.p == 0 or not self.training:
            return x
        width = x.shape[-1]
        index = rows[:, None] * width + torch.arange(width, device=x.device)
        keep = random.uniform(random.key(self.seed, self.site), index) >= self.p
        return torch.where(keep, x * (1 / (1 - self.p)), 0.0)


# ------------------------------------------------------------------------------------------
# Loss


class _CrossEntropy(torch.autograd.Function):
    """Keeps the log probabilities; the gradient is written once, where torch writes it twice."""

    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, targets: Tensor) -> Tensor:
        logp = F.log_softmax(accurate(logits), dim=-1)
        valid = targets >= 0
        ctx.save_for_backward(logp, targets)
        ctx.dtype = logits.dtype
        picked = logp.gather(1, targets.clamp(min=0)[:, None])[:, 0]
        return -torch.where(valid, picked, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        logp, targets = ctx.saved_tensors
        scale = (targets >= 0).to(logp.dtype).mul_(grad)[:, None]
        out = torch.exp(logp).mul_(scale)
        out.scatter_add_(1, targets.clamp(min=0)[:, None], -scale)
        return out.to(ctx.dtype), None


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the cross entropy over valid tokens.

    Args:
        logits: [T, vocab]. targets: int64 [T], -1 where there is nothing to predict.

    Returns:
        A scalar in float32, or float64 for float64 logits.
    """
    return _CrossEntropy.apply(logits, targets)


def softcap(x: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(x / cap), or x where there is no cap."""
    return x if cap is None else torch.tanh(x / cap) * cap
