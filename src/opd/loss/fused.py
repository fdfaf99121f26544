"""The plain divergences on a GPU: one Triton program a row, from both models' logits to values and gradient.

The same arithmetic as `distance` and `divergence` in three sweeps over the row instead of some forty operations over
the chunk: normalisers and entropies; the divergence and the sum of its slopes; the gradient, written over the
student's logits. What has no kernel here (top-k supports, per-entry clips, entropy gates, mixes, weighted KLs, float64)
takes the other path, on any device. With `TRITON_INTERPRET=1` the kernel runs on a CPU, for tests.

Tensor suffixes: N rows of the chunk, V vocabulary.
"""

# Parameters of a Triton program have no types of Python's.
# pyright: reportMissingParameterType=false, reportOperatorIssue=false

from __future__ import annotations

import math
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from opd.config.loss import (
    AnyDivergenceConfig,
    FullSupport,
    JSDConfig,
    PerEntryClip,
    SkewKLConfig,
    SkewReverseKLConfig,
)
from opd.loss.chunked import Chunk, Terms
from opd.loss.clip import row_bound
from opd.loss.head import Head
from opd.loss.logits import LOG_ZERO
from opd.types import Full

# name -> constant of the kernel
_KINDS = {"forward_kl": 0, "reverse_kl": 1, "jsd": 2, "skew_kl": 3, "skew_reverse_kl": 4, "tvd": 5}
_CLIPS = {"none": 0, "per_token": 1, "weight": 2}
_BLOCK = 4096
_OUTPUTS = ("value", "unclipped", "entropy_student", "entropy_teacher", "teacher_top1_agreement", "norm")


def fits(config: AnyDivergenceConfig, dtype: torch.dtype) -> bool:
    """Whether the kernel covers this loss."""
    gated = config.mask.teacher_entropy is not None or config.mask.student_entropy is not None
    return (
        config.name in _KINDS
        and isinstance(config.support, FullSupport)
        and not isinstance(config.clip, PerEntryClip)
        and not gated
        and dtype != torch.float64
    )


def terms(chunk: Chunk, scores: Full, config: AnyDivergenceConfig, head: Head | None) -> Terms:
    """What `DivergenceLoss` says about a chunk; the gradient, of the product, is in the student's storage."""
    student_NV, teacher_NV = chunk.student.storage_VN.T, chunk.teacher(scores).storage_VN.T
    num_rows, num_tokens = student_NV.shape
    found = {name: torch.empty(num_rows, dtype=torch.float32, device=student_NV.device) for name in _OUTPUTS}
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device_of(student_NV):
        if num_rows:
            _rows[(num_rows,)](
                student_NV,
                teacher_NV,
                *student_NV.stride(),
                *teacher_NV.stride(),
                *found.values(),
                num_tokens,
                1.0 / config.temperature,
                _weight(config),
                row_bound(config.clip),
                config.temperature**2 if config.scale_by_temperature_squared else 1.0,
                1.0 if head is None else head.scale,
                1.0 if head is None or head.softcap is None else head.softcap,
                KIND=_KINDS[config.name],
                CLIP=_CLIPS[config.clip.name],
                SOFTCAP=head is not None and head.softcap is not None,
                ZERO=LOG_ZERO,
                BLOCK=min(_BLOCK, triton.next_power_of_2(num_tokens)),
            )
    value_N, norm_N, unclipped_N = found.pop("value"), found.pop("norm"), found["unclipped"]
    metrics = {**found, config.name: unclipped_N}
    if config.clip.name != "none":
        over_N = unclipped_N > row_bound(config.clip)
        removed_N = torch.where(over_N, 1.0 - row_bound(config.clip) / unclipped_N, 0.0)
        removed_N = over_N.to(norm_N.dtype) if config.clip.name == "per_token" else removed_N
        metrics["clipped"] = over_N.to(norm_N.dtype)
        metrics["grad_norm_unclipped"] = norm_N
        metrics["grad_removed_frac"] = torch.where(norm_N > 0, removed_N, 0.0)
    return Terms(value_N, None, metrics)


def _weight(config: AnyDivergenceConfig) -> float:
    if isinstance(config, JSDConfig):
        return config.teacher_weight
    return config.alpha if isinstance(config, SkewKLConfig | SkewReverseKLConfig) else math.nan


def _jit(function: Any) -> Any:
    return triton.jit(function)


@_jit
def _load(ptr, place, stride, valid):
    """A block of a row's logits in float32; −inf behind its end."""
    return tl.load(ptr + place * stride, mask=valid, other=-float("inf")).to(tl.float32)


@_jit
def _log_prob(z, inv_temperature, maximum, log_sum, ZERO: tl.constexpr):
    """log softmax; a logit of −inf counts as the largest one plus ZERO."""
    x = z * inv_temperature
    return tl.where(x == -float("inf"), ZERO * inv_temperature, x - maximum) - log_sum


@_jit
def _entries(log_q, log_p, weight, KIND: tl.constexpr):
    """d_v and its slope; the formulas of `opd.loss.divergence`."""
    q, p = tl.exp(log_q), tl.exp(log_p)
    tiny = 1.1754943508222875e-38
    if KIND == 0:
        value, slope = p * (log_p - log_q), -p
    elif KIND == 1:
        value = q * (log_q - log_p)
        slope = value + q
    elif KIND == 2:
        log_m = tl.log(tl.maximum(weight * p + (1 - weight) * q, tiny))
        slope = (1 - weight) * q * (log_q - log_m)
        value = weight * p * (log_p - log_m) + slope
    elif KIND == 3:
        m = tl.maximum(weight * p + (1 - weight) * q, tiny)
        value, slope = p * (log_p - tl.log(m)), -p * (1 - weight) * q / m
    elif KIND == 4:
        m = tl.maximum((1 - weight) * p + weight * q, tiny)
        value = q * (log_q - tl.log(m))
        slope = value + q * (1 - weight * q / m)
    else:
        value = 0.5 * tl.abs(p - q)
        slope = tl.where(q > p, 0.5 * q, tl.where(q < p, -0.5 * q, 0.0))
    return value, slope, q


@_jit
def _statistics(z, valid, inv_temperature, maximum, total, weighted):
    """Fold a block into the running maximum m, Σ e^(x−m) and Σ (x−m) e^(x−m)."""
    x = tl.where(valid, z * inv_temperature, -float("inf"))
    top = tl.maximum(maximum, tl.max(x, axis=0))
    finite = maximum > -float("inf")
    shift = tl.where(finite, maximum - top, 0.0)
    kept = tl.where(finite, tl.exp(shift), 0.0)
    e = tl.where(x != -float("inf"), tl.exp(x - top), 0.0)
    weighted = kept * (weighted + shift * total) + tl.sum(tl.where(e > 0, (x - top) * e, 0.0), axis=0)
    return top, kept * total + tl.sum(e, axis=0), weighted


@_jit
def _rows(
    s_ptr,
    t_ptr,
    s_row,
    s_token,
    t_row,
    t_token,
    value_ptr,
    unclipped_ptr,
    entropy_s_ptr,
    entropy_t_ptr,
    agreement_ptr,
    norm_ptr,
    num_tokens,
    inv_temperature,
    weight,
    bound,
    value_scale,
    head_scale,
    softcap,
    KIND: tl.constexpr,
    CLIP: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ZERO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    s_ptr += row * s_row
    t_ptr += row * t_row
    s_max, t_max = -float("inf"), -float("inf")
    s_total, s_weighted, t_total, t_weighted = 0.0, 0.0, 0.0, 0.0
    s_at_top = -float("inf")  # the student's logit at the teacher's likeliest token
    for start in range(0, num_tokens, BLOCK):
        place = start + tl.arange(0, BLOCK)
        valid = place < num_tokens
        s = tl.load(s_ptr + place * s_token, mask=valid, other=0.0).to(tl.float32)
        t = tl.load(t_ptr + place * t_token, mask=valid, other=0.0).to(tl.float32)
        x = tl.where(valid, t * inv_temperature, -float("inf"))
        here = tl.max(x, axis=0)
        first = tl.min(tl.where(x == here, place, num_tokens), axis=0)
        at_first = tl.max(tl.where(place == first, s * inv_temperature, -float("inf")), axis=0)
        s_at_top = tl.where(here > t_max, at_first, s_at_top)
        s_max, s_total, s_weighted = _statistics(s, valid, inv_temperature, s_max, s_total, s_weighted)
        t_max, t_total, t_weighted = _statistics(t, valid, inv_temperature, t_max, t_total, t_weighted)
    s_log, t_log = tl.log(s_total), tl.log(t_total)
    tl.store(entropy_s_ptr + row, tl.log(s_total) - s_weighted / s_total)
    tl.store(entropy_t_ptr + row, tl.log(t_total) - t_weighted / t_total)
    tl.store(agreement_ptr + row, tl.where(s_at_top >= s_max, 1.0, 0.0))

    unclipped, slopes = 0.0, 0.0
    for start in range(0, num_tokens, BLOCK):
        place = start + tl.arange(0, BLOCK)
        valid = place < num_tokens
        log_q = _log_prob(_load(s_ptr, place, s_token, valid), inv_temperature, s_max, s_log, ZERO)
        log_p = _log_prob(_load(t_ptr, place, t_token, valid), inv_temperature, t_max, t_log, ZERO)
        value, slope, _q = _entries(log_q, log_p, weight, KIND)
        unclipped += tl.sum(tl.where(valid, value, 0.0), axis=0)
        slopes += tl.sum(tl.where(valid, slope, 0.0), axis=0)
    factor, value = 1.0, unclipped
    if CLIP == 1:
        factor, value = tl.where(unclipped <= bound, 1.0, 0.0), tl.where(unclipped > bound, bound, unclipped)
    elif CLIP == 2:
        factor = tl.where(unclipped > bound, bound / unclipped, 1.0)
        value = unclipped * factor
    tl.store(unclipped_ptr + row, unclipped)
    tl.store(value_ptr + row, value * value_scale)

    squares = 0.0
    for start in range(0, num_tokens, BLOCK):
        place = start + tl.arange(0, BLOCK)
        valid = place < num_tokens
        s = _load(s_ptr, place, s_token, valid)
        log_q = _log_prob(s, inv_temperature, s_max, s_log, ZERO)
        log_p = _log_prob(_load(t_ptr, place, t_token, valid), inv_temperature, t_max, t_log, ZERO)
        _value, slope, q = _entries(log_q, log_p, weight, KIND)
        grad = (slope - q * slopes) * inv_temperature
        squares += tl.sum(tl.where(valid, grad * grad, 0.0), axis=0)
        grad = grad * factor * value_scale * head_scale
        if SOFTCAP:
            z = tl.where(s == -float("inf"), 0.0, s / softcap)
            grad = grad * (1 - z * z)
        tl.store(s_ptr + place * s_token, grad.to(s_ptr.dtype.element_ty), mask=valid)
    tl.store(norm_ptr + row, tl.sqrt(squares))
