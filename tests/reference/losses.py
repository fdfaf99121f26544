"""Every loss once more, in float64 numpy, from the definitions alone: slow, dense, sharing nothing with the library.

Gradients are central differences of the definition, so that no derivation is repeated either.

Tensor suffixes: N supervised tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

Array = np.ndarray


def log_softmax(logits_NV: Array, temperature: float = 1.0) -> Array:
    z = np.asarray(logits_NV, dtype=np.float64) / temperature
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def entries(name: str, student_NV: Array, teacher_NV: Array, temperature: float, teacher_weight: float = 0.5) -> Array:
    """d_v: [N, V], the divergence before it is summed over the vocabulary."""
    log_q, log_p = log_softmax(student_NV, temperature), log_softmax(teacher_NV, temperature)
    q, p = np.exp(log_q), np.exp(log_p)
    if name == "forward_kl":
        return p * (log_p - log_q)
    if name == "reverse_kl":
        return q * (log_q - log_p)
    if name == "jsd":
        w = teacher_weight
        log_m = np.log(w * p + (1 - w) * q)
        return w * p * (log_p - log_m) + (1 - w) * q * (log_q - log_m)
    raise ValueError(name)


def divergence(
    name: str,
    student_NV: Array,
    teacher_NV: Array,
    *,
    temperature: float = 1.0,
    clip: Mapping[str, object] | None = None,
    teacher_weight: float = 0.5,
) -> Array:
    """[N] nats after the clip."""
    d_NV = entries(name, student_NV, teacher_NV, temperature, teacher_weight)
    kind, bound = _clip(clip)
    if kind == "per_entry":
        return np.minimum(d_NV, bound).sum(-1)
    return np.minimum(d_NV.sum(-1), bound)  # `weight` bounds the value just as `per_token` does


def divergence_gradient(
    name: str,
    student_NV: Array,
    teacher_NV: Array,
    *,
    temperature: float = 1.0,
    clip: Mapping[str, object] | None = None,
    teacher_weight: float = 0.5,
) -> Array:
    """[N, V]: d(value_n)/d(student logits_n); the factor of a `weight` clip counts as a constant."""
    options = {"temperature": temperature, "teacher_weight": teacher_weight}
    kind, bound = _clip(clip)
    if kind == "weight":
        value_N = divergence(name, student_NV, teacher_NV, **options)
        factor_N = np.minimum(1.0, bound / np.maximum(value_N, 1e-300))
        return factor_N[:, None] * differences(lambda z: divergence(name, z, teacher_NV, **options), student_NV)
    return differences(lambda z: divergence(name, z, teacher_NV, clip=clip, **options), student_NV)


def sampled_reverse_kl(
    student_NV: Array,
    teacher_logp_N: Array,
    ids_N: Array,
    *,
    temperature: float = 1.0,
    discount: float = 0.0,
    sequence_N: Array | None = None,
    max_advantage: float = np.inf,
    behavior_logp_N: Array | None = None,
    importance_clip: float = np.inf,
) -> tuple[Array, Array]:
    """Values [N] and their gradient [N, V], in which only the last factor, log q(y), is differentiated."""
    rows = np.arange(len(ids_N))

    def log_q(z: Array) -> Array:
        return log_softmax(z, temperature)[rows, ids_N]

    advantage_N = teacher_logp_N - log_q(student_NV)
    total_N = advantage_N.copy()
    if sequence_N is not None:
        for t in rows:
            later = [s for s in rows if s >= t and sequence_N[s] == sequence_N[t]]
            total_N[t] = sum(discount ** (s - t) * advantage_N[s] for s in later)
    total_N = np.clip(total_N, -max_advantage, max_advantage)
    if behavior_logp_N is not None:
        total_N = total_N * np.minimum(np.exp(log_q(student_NV) - behavior_logp_N), importance_clip)
    return -total_N * log_q(student_NV), -total_N[:, None] * differences(log_q, student_NV)


def differences(function: Callable[[Array], Array], logits_NV: Array, step: float = 1e-6) -> Array:
    """[N, V]: central differences of a function [N, V] -> [N] whose rows do not see each other."""
    z = np.asarray(logits_NV, dtype=np.float64)
    gradient = np.empty_like(z)
    for v in range(z.shape[1]):
        up, down = z.copy(), z.copy()
        up[:, v] += step
        down[:, v] -= step
        gradient[:, v] = (function(up) - function(down)) / (2 * step)
    return gradient


def _clip(clip: Mapping[str, object] | None) -> tuple[object, float]:
    if clip is None or clip["name"] == "none":
        return "none", np.inf
    return clip["name"], float(clip["max"])  # type: ignore[arg-type]
