"""A loss over rows of logits in one pass: values, metrics and the gradient together, chunk by chunk.

The value of a row depends on that row's hidden state alone. So d(value_n)/d(hidden_n) is known as soon as the row's
logits are, and the backward pass of a frozen head is one multiplication with the upstream gradient. Per chunk there are
three products (student logits, teacher logits, gradient with the weight) and nothing of size [N, V] exists. A head that
trains adds the product for its own gradient, formed in the same pass for an upstream gradient that is the same for all
rows (what a mean over tokens gives); for any other, the backward pass makes the logits once more.

Tensor suffixes: N supervised tokens (of the batch or of a chunk), V vocabulary, v a tile of it, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from opd.loss.head import Head, statistics_dtype
from opd.loss.logits import Logits, Scratch, is_row_major, storage_dtype
from opd.types import Full, TokenLoss

# Memory of the logits of both models together, and of one buffer for a tile of the vocabulary. On a CPU a tile stays in
# the cache; on other devices it is as large as launches make worth while. Chunks have a multiple of so many rows, which
# products run best with, and a head's gradient in 16 bits is added so many tokens at a time.
_CHUNK_BYTES, _CHUNK_BYTES_DEVICE = 120 * 2**20, 1024 * 2**20
_TILE_BYTES, _TILE_BYTES_DEVICE = 4 * 2**20, 128 * 2**20
_ROWS, _HEAD_TOKENS = 16, 8192


@dataclass(frozen=True)
class Terms:
    """What an objective says about a chunk of rows.

    Args:
        values_N: [N] nats.
        gradient: vocabulary tile -> [N, v] d(value_n)/d(logits_n), in a buffer that the next tile may overwrite. Asked
            for every tile, in order. None when the student's logits have become d(value_n)/d(product) already.
        metrics: [N] tensors by name.
        gradient_metrics: read when all tiles have been asked for -> further metrics; None when the gradient itself is
            not looked at.
    """

    values_N: Tensor
    gradient: Callable[[slice], Tensor] | None
    metrics: Mapping[str, Tensor]
    gradient_metrics: Callable[[], Mapping[str, Tensor]] | None = None


class Chunk:
    """A chunk of rows on its way through an objective.

    Args:
        rows: the chunk's places in the batch, with which an objective finds the teacher's rows.
        student: its logits.
    """

    def __init__(self, rows: slice, student: Logits, storage: _Storage) -> None:
        self.rows, self.student = rows, student
        self._storage = storage
        self._teacher: tuple[Full, Logits] | None = None

    def teacher(self, scores: Full) -> Logits:
        """The teacher's logits of the same rows, computed once for all who ask."""
        if self._teacher is None or self._teacher[0] is not scores:
            hidden_ND = scores.hidden_ND[self.rows]
            inputs = (hidden_ND,) if scores.head is None else scores.head.inputs(hidden_ND)
            dtype = storage_dtype(scores.head, hidden_ND)
            logits = self._storage.logits("teacher", self.student.num_tokens, self.student.num_rows, dtype)
            self._teacher = scores, logits.fill(inputs, scores.head)
        return self._teacher[1]


# The objective owns the chunk's logits until its gradient has been asked for all tiles.
Objective = Callable[[Chunk], Terms]


def rowwise(
    objective: Objective,
    hidden_ND: Float[Tensor, "N D"],
    head: Head | None,
    chunk_bytes: int | None = None,
    *,
    uniform: bool = True,
) -> TokenLoss:
    """Evaluate an objective on every row of ``head.logits(hidden)``, differentiable in hidden states and head.

    Args:
        objective: value and gradient of a chunk of rows.
        hidden_ND: [N, D] hidden states, or [N, V] logits when there is no head.
        head: the output head, or None.
        chunk_bytes: memory of the logits of a chunk, both models together; sets how many rows go together. None
            chooses by device.
        uniform: whether to expect the same upstream gradient for all rows; if not, the gradient of a head that trains
            is left to the backward pass. The result is the same.

    Returns:
        Values [N] in float32 (float64 for float64 inputs) and detached metrics [N].
    """
    metrics: dict[str, Tensor] = {}
    if not torch.is_grad_enabled():  # then nothing below is to see that a tensor could have a gradient
        hidden_ND, head = hidden_ND.detach(), None if head is None else head.detached()
    inputs = (hidden_ND,) if head is None else head.inputs(hidden_ND)
    rows = _Rows(objective, head, chunk_bytes, uniform)
    # The weights are inputs only so that autograd asks for their gradient; the head computes with the same tensors.
    weights = () if head is None else head.factors
    values_N: Any = _Rowwise.apply(rows, metrics, len(inputs), None if head is None else head.bias_V, *inputs, *weights)
    return TokenLoss(values_N, metrics)


class _Storage:
    """Memory that chunk after chunk uses: the logits of both models and the buffers of a tile."""

    def __init__(self, max_rows: int, num_tokens: int, like: Tensor) -> None:
        self._like, self._size = like, max_rows * num_tokens
        self._made: dict[tuple[str, torch.dtype], Tensor] = {}
        dtype = statistics_dtype(like)
        tile_bytes = _TILE_BYTES if like.device.type == "cpu" else _TILE_BYTES_DEVICE
        tile_size = max(1, min(num_tokens, tile_bytes // (max_rows * dtype.itemsize)))
        tile_size = tile_size - tile_size % 64 if tile_size > 64 else tile_size
        self._scratch = Scratch(max_rows, tile_size, dtype, like.device)

    def logits(self, name: str, num_tokens: int, num_rows: int, dtype: torch.dtype) -> Logits:
        if (name, dtype) not in self._made:
            self._made[name, dtype] = torch.empty(self._size, dtype=dtype, device=self._like.device)
        memory = self._made[name, dtype][: num_tokens * num_rows]
        if is_row_major(memory.device):
            return Logits(memory.view(num_rows, num_tokens).T, self._scratch)
        return Logits(memory.view(num_tokens, num_rows), self._scratch)


@dataclass(frozen=True)
class _Rows:
    """The chunks of a batch: terms with respect to the product hidden @ weight.T + bias."""

    objective: Objective
    head: Head | None
    chunk_bytes: int | None
    uniform: bool

    def chunks(self, inputs: Sequence[Tensor], *, gradient: bool) -> Iterator[tuple[slice, Terms, Tensor]]:
        """Each chunk's rows, terms and storage [V, N], which holds the gradient if it was asked for."""
        hidden_ND, head = inputs[0], self.head
        num_rows = hidden_ND.shape[0]
        num_tokens = hidden_ND.shape[1] if head is None else head.num_tokens
        dtype = storage_dtype(head, hidden_ND)
        size = self._chunk_rows(num_rows, num_tokens * dtype.itemsize, hidden_ND.device)
        storage = _Storage(size, num_tokens, hidden_ND if head is None else head.weight)
        # At least one chunk, so that an empty batch has its (empty) metrics too.
        for start in range(0, max(1, num_rows), size):
            rows = slice(start, min(start + size, num_rows))
            student = storage.logits("student", num_tokens, rows.stop - rows.start, dtype)
            student.fill([x_ND[rows] for x_ND in inputs], head)
            terms = self.objective(Chunk(rows, student, storage))
            write = terms.gradient if gradient or terms.gradient_metrics else None
            for tile in student.tiles() if write else ():
                assert write is not None
                grad_Nv = write(tile)
                if head is not None and (head.softcap is not None or head.scale != 1.0):
                    grad_Nv = grad_Nv.mul_(head.slope(student.scaled(tile, 1.0, "z")))
                student.storage_VN[tile].copy_(grad_Nv.T)
            yield rows, terms, student.storage_VN

    def _chunk_rows(self, num_rows: int, row_bytes: int, device: torch.device) -> int:
        budget = self.chunk_bytes or (_CHUNK_BYTES if device.type == "cpu" else _CHUNK_BYTES_DEVICE)
        most = max(1, min(budget // (2 * row_bytes), num_rows))
        return most - most % _ROWS if most > _ROWS else most


class _Rowwise(torch.autograd.Function):
    """d(values)/d(inputs) and, for a uniform upstream gradient, d/d(weights) are worked out in the forward."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: _Rows,
        metrics: dict[str, Tensor],
        num_inputs: int,
        bias_V: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        inputs, weights = tensors[:num_inputs], tensors[num_inputs:]
        needs: tuple[bool, ...] = ctx.needs_input_grad
        needs_inputs, needs_weights = needs[4 : 4 + num_inputs], needs[4 + num_inputs :]
        slopes = [torch.empty_like(x_ND) if need else None for x_ND, need in zip(inputs, needs_inputs, strict=True)]
        heads = None
        if rows.uniform and (any(needs_weights) or needs[3]):
            heads = _HeadGradient(weights, needs_weights, bias_V if needs[3] else None)
        values = list[Tensor]()
        parts: dict[str, list[Tensor]] = {}
        with torch.autocast(inputs[0].device.type, enabled=False):
            for chunk, terms, grad_VN in rows.chunks(inputs, gradient=any(needs)):
                values.append(terms.values_N)
                measured = terms.gradient_metrics() if terms.gradient_metrics else {}
                for name, metric_N in {**terms.metrics, **measured}.items():
                    parts.setdefault(name, []).append(metric_N)
                for number, slope_ND in enumerate(slopes):
                    if slope_ND is not None:
                        slope_ND[chunk] = _back(grad_VN, weights[number] if weights else None)
                if heads is not None:
                    heads.add(grad_VN, [x_ND[chunk] for x_ND in inputs])
        metrics.update({name: torch.cat(part) for name, part in parts.items()})
        ctx.rows, ctx.num_inputs, ctx.heads = rows, num_inputs, heads
        ctx.save_for_backward(bias_V, *tensors, *slopes)
        return torch.cat(values)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  (the decorator hides the parameters' names)
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (upstream_N,) = grad_outputs
        bias_V, *saved = ctx.saved_tensors
        num_inputs: int = ctx.num_inputs
        num_weights = len(saved) - 2 * num_inputs
        inputs, weights = saved[:num_inputs], saved[num_inputs : num_inputs + num_weights]
        slopes = saved[num_inputs + num_weights :]
        needs: tuple[bool, ...] = ctx.needs_input_grad
        # A row that nobody asked about has no gradient, even where its own is NaN: 0 times NaN would be NaN.
        unused_N1 = (upstream_N == 0)[:, None]
        d_inputs = [
            None if slope is None else (upstream_N[:, None] * slope).masked_fill_(unused_N1, 0).to(x_ND.dtype)
            for slope, x_ND in zip(slopes, inputs, strict=True)
        ]
        d_weights: list[Tensor | None] = [None] * num_weights
        d_bias_V = None
        if needs[3] or any(needs[4 + num_inputs :]):
            heads: _HeadGradient | None = ctx.heads
            ctx.heads = None
            if heads is not None and _is_uniform(upstream_N):
                heads.scale(upstream_N[0])
            else:
                heads = _HeadGradient(weights, needs[4 + num_inputs :], bias_V if needs[3] else None)
                # Largest factor 1: gradients in 16 bits have no room for a division by the tokens of a batch.
                peak = upstream_N.abs().amax().clamp(min=torch.finfo(upstream_N.dtype).tiny) if len(upstream_N) else 1.0
                with torch.autocast(upstream_N.device.type, enabled=False):
                    for chunk, _terms, grad_VN in ctx.rows.chunks(inputs, gradient=True):
                        grad_VN.mul_(upstream_N[chunk] / peak).masked_fill_(unused_N1[chunk].T, 0)
                        # An unused row's input may be NaN as well, and meets its zero gradient in the product.
                        heads.add(grad_VN, [x_ND[chunk].masked_fill(unused_N1[chunk], 0) for x_ND in inputs])
                heads.scale(peak)
            d_weights, d_bias_V = heads.results()
        return (None, None, None, d_bias_V, *d_inputs, *d_weights)


def _is_uniform(upstream_N: Tensor) -> bool:
    """The same for all rows, and not zero: then rows may be NaN that nobody asked about."""
    return bool(upstream_N.numel() and (upstream_N == upstream_N[0]).all() and upstream_N[0] != 0)


def _back(grad_VN: Tensor, weight_VD: Tensor | None) -> Tensor:
    """[N, D]: the gradient with respect to the factor's input; the product as [D, N], which is faster for few rows."""
    if weight_VD is None:
        return grad_VN.T
    return torch.mm(weight_VD.T, grad_VN.to(weight_VD.dtype)).T


class _HeadGradient:
    """Gradients of the head's factors and bias, summed over chunks in float32."""

    def __init__(self, weights: Sequence[Tensor], needed: Sequence[bool], bias_V: Tensor | None) -> None:
        self._weights, self._bias_V = weights, bias_V
        self._sums = [
            torch.zeros_like(weight, dtype=statistics_dtype(weight)) if need else None
            for weight, need in zip(weights, needed, strict=True)
        ]
        self._bias_sum = None if bias_V is None else torch.zeros_like(bias_V, dtype=statistics_dtype(bias_V))

    def add(self, grad_VN: Tensor, inputs: Sequence[Tensor]) -> None:
        for total_VD, weight_VD, x_ND in zip(self._sums, self._weights, inputs, strict=True):
            if total_VD is None:
                continue
            if total_VD.dtype == weight_VD.dtype == grad_VN.dtype:
                total_VD.addmm_(grad_VN, x_ND.to(total_VD.dtype))
            else:
                x_ND = x_ND.to(weight_VD.dtype)
                # Tile by tile: the product in 16 bits would be as large as the weight.
                for total_vD, grad_vN in zip(total_VD.split(_HEAD_TOKENS), grad_VN.split(_HEAD_TOKENS), strict=True):
                    total_vD.add_(torch.mm(grad_vN.to(weight_VD.dtype), x_ND))
        if self._bias_sum is not None:
            self._bias_sum.add_(grad_VN.sum(1, dtype=self._bias_sum.dtype))

    def scale(self, factor: Tensor | float) -> None:
        for total in (*self._sums, self._bias_sum):
            if total is not None:
                total.mul_(factor)

    def results(self) -> tuple[list[Tensor | None], Tensor | None]:
        weights = [
            None if total is None else total.to(weight.dtype)
            for total, weight in zip(self._sums, self._weights, strict=True)
        ]
        bias = None if self._bias_sum is None or self._bias_V is None else self._bias_sum.to(self._bias_V.dtype)
        return weights, bias
