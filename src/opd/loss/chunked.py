"""A loss over rows of logits in one pass: values, metrics and the gradient together, chunk by chunk.

The value of a row depends on that row's hidden state alone. So d(value_n)/d(hidden_n) is known as soon as the row's
logits are, and the backward pass of a frozen head is one multiplication with the upstream gradient. Per chunk there are
three products (student logits, teacher logits, gradient with the weight) and nothing of size [N, V] exists.

Tensor suffixes: N supervised tokens (of the batch or of a chunk), V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from opd.loss.head import Head, statistics_dtype
from opd.types import TokenLoss

# One buffer of logits; an objective holds five. More rows a chunk read the weights fewer times.
_CHUNK_BYTES = {"cpu": 48 * 2**20}
_CHUNK_BYTES_DEVICE = 256 * 2**20


class Buffers:
    """[rows, V] buffers by name, made when first asked for and used again by every later chunk.

    Tensors made anew for every chunk would cost as much as the arithmetic on them: memory this large is given back to
    the system at each free, and taken page by page at each use.
    """

    def __init__(self, num_rows: int, num_tokens: int, like: Tensor) -> None:
        self._shape = (num_rows, num_tokens)
        self._like = like
        self._made: dict[str, Tensor] = {}

    def take(self, name: str, num_rows: int) -> Tensor:
        """The first `num_rows` rows of a buffer, uninitialised; the same memory for the same name."""
        if name not in self._made:
            self._made[name] = torch.empty(self._shape, dtype=statistics_dtype(self._like), device=self._like.device)
        return self._made[name][:num_rows]


@dataclass(frozen=True)
class RowTerms:
    """What an objective says about a chunk of rows.

    Args:
        values_N: [N] nats.
        grad_NV: [N, V] d(value_n)/d(logits_n).
        metrics: [N] tensors by name.
    """

    values_N: Tensor
    grad_NV: Tensor
    metrics: Mapping[str, Tensor]


# (logits_NV, rows, buffers) -> RowTerms. The objective owns the logits and may overwrite them; `rows` are the chunk's
# places in the batch, with which it finds the teacher's rows; what it returns is used up before the next chunk.
RowObjective = Callable[[Tensor, slice, Buffers], RowTerms]


def rowwise(
    objective: RowObjective, hidden_ND: Float[Tensor, "N D"], head: Head | None, chunk_bytes: int | None = None
) -> TokenLoss:
    """Evaluate an objective on every row of ``head.logits(hidden)``, differentiable in hidden states and head.

    Args:
        objective: value and gradient of a chunk of rows.
        hidden_ND: [N, D] hidden states, or [N, V] logits when there is no head.
        head: the output head, or None.
        chunk_bytes: size of one buffer of logits; sets how many rows go together. None chooses by device.

    Returns:
        Values [N] in float32 (float64 for float64 inputs) and detached metrics [N].
    """
    num_tokens = hidden_ND.shape[-1] if head is None else head.num_tokens
    itemsize = statistics_dtype(hidden_ND if head is None else head.weight).itemsize
    budget = chunk_bytes or _CHUNK_BYTES.get(hidden_ND.device.type, _CHUNK_BYTES_DEVICE)
    num_rows = max(1, min(budget // (num_tokens * itemsize), hidden_ND.shape[0]))
    metrics: dict[str, Tensor] = {}
    # The weight is an input only so that autograd asks for its gradient; the head computes with the same tensor.
    weight, bias = (None, None) if head is None else (head.weight_VD, head.bias_V)
    values_N: Any = _Rowwise.apply(hidden_ND, weight, bias, _Rows(objective, head, num_rows), metrics)
    return TokenLoss(values_N, metrics)


@dataclass(frozen=True)
class _Rows:
    """The chunks of a batch: terms with respect to the product hidden @ weight.T + bias."""

    objective: RowObjective
    head: Head | None
    num_rows: int

    def chunks(self, hidden_ND: Tensor) -> Iterator[tuple[slice, RowTerms]]:
        num_rows = hidden_ND.shape[0]
        if self.head is None:
            buffers = Buffers(self.num_rows, hidden_ND.shape[1], hidden_ND)
        else:
            buffers = Buffers(self.num_rows, self.head.num_tokens, self.head.weight)
        # At least one chunk, so that an empty batch has its (empty) metrics too.
        for start in range(0, max(1, num_rows), self.num_rows):
            rows = slice(start, min(start + self.num_rows, num_rows))
            logits_NV = buffers.take("student", rows.stop - rows.start)
            if self.head is None:
                yield rows, self.objective(logits_NV.copy_(hidden_ND[rows]), rows, buffers)
                continue
            self.head.logits(hidden_ND[rows], out=logits_NV)
            slope = self.head.slope(logits_NV)  # before the objective overwrites the logits
            terms = self.objective(logits_NV, rows, buffers)
            if isinstance(slope, Tensor) or slope != 1.0:
                terms.grad_NV.mul_(slope)
            yield rows, terms


class _Rowwise(torch.autograd.Function):
    """d(values)/d(hidden) is worked out in the forward; d(weight) in the backward, from logits made once more."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor | None,
        bias_V: Tensor | None,
        rows: _Rows,
        metrics: dict[str, Tensor],
    ) -> Tensor:
        values = list[Tensor]()
        parts: dict[str, list[Tensor]] = {}
        slope_ND = torch.empty_like(hidden_ND) if ctx.needs_input_grad[0] else None
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for chunk, terms in rows.chunks(hidden_ND):
                values.append(terms.values_N)
                for name, metric_N in terms.metrics.items():
                    parts.setdefault(name, []).append(metric_N)
                if slope_ND is not None:
                    grad = terms.grad_NV
                    slope_ND[chunk] = grad if weight_VD is None else grad.to(weight_VD.dtype) @ weight_VD
        metrics.update({name: torch.cat(part) for name, part in parts.items()})
        ctx.rows = rows
        ctx.save_for_backward(slope_ND, hidden_ND, weight_VD, bias_V)
        return torch.cat(values)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  (the decorator hides the parameters' names)
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (upstream_N,) = grad_outputs
        slope_ND, hidden_ND, weight_VD, bias_V = ctx.saved_tensors
        # A row that nobody asked about has no gradient, even where its own is NaN: 0 times NaN would be NaN.
        unused_N1 = (upstream_N == 0)[:, None]
        d_hidden_ND = d_weight_VD = d_bias_V = None
        if ctx.needs_input_grad[0]:
            d_hidden_ND = (upstream_N[:, None] * slope_ND).masked_fill_(unused_N1, 0).to(hidden_ND.dtype)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            d_weight_VD, d_bias_V = _head_gradient(ctx.rows, upstream_N, unused_N1, hidden_ND, weight_VD)
        return (
            d_hidden_ND,
            d_weight_VD if ctx.needs_input_grad[1] else None,
            d_bias_V.to(bias_V.dtype) if d_bias_V is not None and ctx.needs_input_grad[2] else None,
            None,
            None,
        )


def _head_gradient(
    rows: _Rows, upstream_N: Tensor, unused_N1: Tensor, hidden_ND: Tensor, weight_VD: Tensor
) -> tuple[Tensor, Tensor]:
    """d(weight) and d(bias), summed over chunks in float32."""
    dtype = statistics_dtype(weight_VD)
    d_weight_VD = torch.zeros_like(weight_VD, dtype=dtype)
    d_bias_V = torch.zeros(weight_VD.shape[0], dtype=dtype, device=weight_VD.device)
    with torch.autocast(hidden_ND.device.type, enabled=False):
        for chunk, terms in rows.chunks(hidden_ND):
            grad_NV = terms.grad_NV.mul_(upstream_N[chunk, None]).masked_fill_(unused_N1[chunk], 0)
            # An unused row's hidden state may be NaN as well, and meets its zero gradient in the product below.
            chunk_ND = hidden_ND[chunk].masked_fill(unused_N1[chunk], 0).to(weight_VD.dtype)
            if dtype == weight_VD.dtype:
                d_weight_VD.addmm_(grad_NV.T, chunk_ND)
            else:
                d_weight_VD.add_(grad_NV.T.to(weight_VD.dtype) @ chunk_ND)
            d_bias_V.add_(grad_NV.sum(0))
    return d_weight_VD.to(weight_VD.dtype), d_bias_V
