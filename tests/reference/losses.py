"""Every loss once more, in float64 numpy, from the definitions alone: slow, one row at a time, sharing nothing with the
library.

Gradients are differences of the definition, so that no derivation is repeated either. What a definition calls detached
(weights, the factor of a clip, advantages, which tokens a support holds) is worked out once and held while the logits
are moved. Configs are those of a recipe, as mappings.

Tensor suffixes: N supervised tokens, V vocabulary, K tokens that a teacher gave, O outcomes that a divergence is summed
over, M any number of logits for the same row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

Array = np.ndarray
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Scores:
    """Of a loss: values [N] and their gradient [N, V]; and metrics [N], NaN where a loss does not have them."""

    values: Array
    gradient: Array
    unclipped: Array
    unclipped_gradient: Array
    clipped: Array
    entropy_student: Array
    entropy_teacher: Array
    kept_mass_student: Array
    kept_mass_teacher: Array


# ---- divergences -----------------------------------------------------------------------------------------------------


def divergence(config: Config, student_NV: Array, teacher: Array | tuple[Array, Array]) -> Scores:
    """A divergence between softmax(student/τ) and the teacher: its logits [N, V], or ids and log-probabilities [N, K]
    of its likeliest tokens, which are at τ already.
    """
    rows = list[Scores]()
    for n, z_V in enumerate(np.asarray(student_NV, dtype=np.float64)):
        known = (teacher[0][n], teacher[1][n]) if isinstance(teacher, tuple) else np.asarray(teacher[n], np.float64)
        rows.append(_divergence_row(config, z_V, known))
    return _stack(rows)


def _divergence_row(config: Config, z_V: Array, teacher: Array | tuple[Array, Array]) -> Scores:
    temperature = config.get("temperature", 1.0)
    q_V = np.exp(log_softmax(z_V, temperature))
    ids, has_rest, log_p_O, kept_teacher, entropy_teacher = _teacher_outcomes(config, q_V, teacher)

    def log_q(z_MV: Array) -> Array:
        return _over(ids, has_rest, config, log_softmax(z_MV, temperature))

    weights = _kl_weights(config, log_q(z_V), log_p_O, has_rest, entropy_teacher)
    clip = config.get("clip", {"name": "none"})

    def entries(z_MV: Array) -> Array:
        return _entries(config, log_q(z_MV), log_p_O, weights)

    def total(z_MV: Array) -> Array:
        return entries(z_MV).sum(-1)

    d_O = entries(z_V)
    unclipped, unclipped_gradient = d_O.sum(), differences(total, z_V)
    value, gradient, clipped = unclipped, unclipped_gradient, float(unclipped > clip.get("max", np.inf))
    if clip["name"] == "per_entry":
        value, clipped = np.minimum(d_O, clip["max"]).sum(), float((d_O > clip["max"]).any())
        gradient = differences(lambda z_MV: np.minimum(entries(z_MV), clip["max"]).sum(-1), z_V)
    elif clip["name"] == "per_token":
        value = min(unclipped, clip["max"])
        gradient = differences(lambda z_MV: np.minimum(total(z_MV), clip["max"]), z_V)
    elif clip["name"] == "weight":
        factor = min(1.0, clip["max"] / unclipped) if unclipped > 0 else 1.0
        value, gradient = unclipped * factor, differences(lambda z_MV: factor * total(z_MV), z_V)
    if config.get("scale_by_temperature_squared"):
        value, gradient = value * temperature**2, gradient * temperature**2
    entropy_student = _entropy(q_V)
    kept_student = np.nan if np.isnan(kept_teacher) else q_V[ids].sum()
    scores = (value, gradient, unclipped, unclipped_gradient, clipped, entropy_student, entropy_teacher)
    row = Scores(*map(np.float64, scores), np.float64(kept_student), np.float64(kept_teacher))
    return row if _open(config, entropy_student, entropy_teacher) else _shut(row)


def _teacher_outcomes(
    config: Config, q_V: Array, teacher: Array | tuple[Array, Array]
) -> tuple[list[int], bool, Array, float, float]:
    """Ids of the support, whether one outcome stands for the rest, the teacher's log-probabilities of these outcomes,
    the mass it gives to the ids (NaN without a support), and its entropy (over the outcomes, if they are all it gave).
    """
    support = config.get("support", {"name": "full"})
    has_rest = support["name"] == "top_k" and support.get("tail", "bucket") == "bucket"
    if isinstance(teacher, tuple):
        likeliest = np.argsort(-teacher[1])[: support["k"]]
        ids, log_p_K = [int(v) for v in teacher[0][likeliest]], np.asarray(teacher[1], np.float64)[likeliest]
        kept = np.exp(log_p_K).sum()
        log_p_O = np.append(log_p_K, np.log(1 - kept)) if has_rest else log_p_K - np.log(kept)
        return ids, has_rest, log_p_O, kept, _entropy(np.exp(log_p_O))
    log_p_V = log_softmax(teacher, config.get("temperature", 1.0))
    entropy = _entropy(np.exp(log_p_V))
    if support["name"] == "full":
        return list(range(len(log_p_V))), False, log_p_V, np.nan, entropy
    k, of = support["k"], support.get("of", "teacher")
    chosen: set[int] = set()
    if of in ("teacher", "union"):
        chosen |= {int(v) for v in np.argsort(-log_p_V)[:k]}
    if of in ("student", "union"):
        chosen |= {int(v) for v in np.argsort(-q_V)[:k]}
    ids = sorted(chosen)
    return ids, has_rest, _over(ids, has_rest, config, log_p_V), np.exp(log_p_V[ids]).sum(), entropy


def _over(ids: list[int], has_rest: bool, config: Config, log_MV: Array) -> Array:
    """Log-probabilities of the outcomes: tokens as they are; or with the rest as one more; or scaled to one."""
    if config.get("support", {"name": "full"})["name"] == "full":
        return log_MV
    kept_MK = log_MV[..., ids]
    if not has_rest:
        return kept_MK - np.log(np.exp(kept_MK).sum(-1, keepdims=True))
    others = [v for v in range(log_MV.shape[-1]) if v not in ids]
    with np.errstate(divide="ignore"):
        return np.concatenate([kept_MK, np.log(np.exp(log_MV[..., others]).sum(-1, keepdims=True))], -1)


def _entries(config: Config, log_q: Array, log_p: Array, weights: tuple[float, float]) -> Array:
    """d_v, the divergence before it is summed over the outcomes."""
    name, q, p = config["name"], np.exp(log_q), np.exp(log_p)

    def kl(log_a: Array, log_b: Array) -> Array:
        with np.errstate(invalid="ignore"):
            return np.where(np.exp(log_a) > 0, np.exp(log_a) * (log_a - log_b), 0.0)

    if name == "forward_kl":
        return kl(log_p, log_q)
    if name == "reverse_kl":
        return kl(log_q, log_p)
    if name == "jsd":
        w = config.get("teacher_weight", 0.5)
        log_m = np.log(w * p + (1 - w) * q)
        return w * kl(log_p, log_m) + (1 - w) * kl(log_q, log_m)
    if name == "skew_kl":
        alpha = config.get("alpha", 0.1)
        return kl(log_p, np.log(alpha * p + (1 - alpha) * q))
    if name == "skew_reverse_kl":
        alpha = config.get("alpha", 0.1)
        return kl(log_q, np.log((1 - alpha) * p + alpha * q))
    if name in ("adaptive_kl", "entropy_aware"):
        return weights[0] * kl(log_p, log_q) + weights[1] * kl(log_q, log_p)
    assert name == "tvd"
    return np.abs(p - q) / 2


def _kl_weights(config: Config, log_q: Array, log_p: Array, has_rest: bool, entropy: float) -> tuple[float, float]:
    """Of forward and reverse KL, for the two divergences that weigh them; numbers, not functions of the student."""
    if config["name"] == "entropy_aware":
        return config.get("forward_weight", 1.0) * (entropy > config.get("threshold", 0.8)), 1.0
    if config["name"] != "adaptive_kl":
        return np.nan, np.nan
    p, q = np.exp(log_p), np.exp(log_q)
    tokens = p[:-1] if has_rest else p
    mass, least = 0.0, np.inf
    for likely in sorted(tokens, reverse=True):
        mass, least = mass + likely, likely
        if mass >= config.get("head_mass", 0.5):
            break
    # Tokens as likely as the last of the head are of the head; what stands for all others is not.
    in_head = np.append(tokens >= least, False) if has_rest else tokens >= least
    head, tail = np.abs(p - q)[in_head].sum(), np.abs(p - q)[~in_head].sum()
    return head / (head + tail), tail / (head + tail)


# ---- sampled tokens, mixes -------------------------------------------------------------------------------------------


def sft(config: Config, student_NV: Array, ids_N: Array) -> Scores:
    """−log q(y)."""

    def row(z_V: Array, y: int) -> Scores:
        return _row_of(config, z_V, 1.0, lambda z_MV: -log_softmax(z_MV)[..., y])

    return _stack([row(z_V, y) for z_V, y in zip(np.asarray(student_NV, np.float64), ids_N, strict=True)])


def sampled_reverse_kl(
    config: Config,
    student_NV: Array,
    teacher_logp_N: Array,
    ids_N: Array,
    *,
    behavior_logp_N: Array | None = None,
    sequence_N: Array | None = None,
    baseline_N: Array | None = None,
) -> Scores:
    """−A·log q(y): only the last factor is differentiated. `unclipped` is −(log p − log q), before all options."""
    temperature = config.get("temperature", 1.0)
    rows = range(len(ids_N))
    log_q_N = np.array([log_softmax(student_NV[n], temperature)[ids_N[n]] for n in rows])
    own_N = teacher_logp_N - log_q_N
    weight_N = own_N.copy()
    if config.get("discount"):
        assert sequence_N is not None
        for t in rows:
            later = [s for s in rows if s >= t and sequence_N[s] == sequence_N[t]]
            weight_N[t] = sum(config["discount"] ** (s - t) * own_N[s] for s in later)
    if config.get("group_baseline"):
        weight_N = weight_N - baseline_N
    if config.get("max_advantage") is not None:
        weight_N = np.clip(weight_N, -config["max_advantage"], config["max_advantage"])
    if config.get("importance") is not None:
        weight_N = weight_N * np.minimum(np.exp(log_q_N - behavior_logp_N), config["importance"]["clip"])

    def row(n: int) -> Scores:
        y, weight, z_V = ids_N[n], weight_N[n], np.asarray(student_NV[n], np.float64)
        return _row_of(
            config, z_V, temperature, lambda z_MV: -weight * log_softmax(z_MV, temperature)[..., y], -own_N[n]
        )

    return _stack([row(n) for n in rows])


def group_baseline(advantage_N: Array, sequence_N: Array, group_N: Array) -> Array:
    """[N] mean over the tokens of the other sequences of the same group; 0 where there are none."""
    others = [
        [a for a, s, g in zip(advantage_N, sequence_N, group_N, strict=True) if g == group and s != sequence]
        for sequence, group in zip(sequence_N, group_N, strict=True)
    ]
    return np.array([np.mean(values) if values else 0.0 for values in others])


def mix(weights: Sequence[float], parts: Sequence[Scores]) -> tuple[Array, Array]:
    """Weighted sums of values [N] and gradients [N, V]."""
    pairs = list(zip(weights, parts, strict=True))
    return sum(w * part.values for w, part in pairs), sum(w * part.gradient for w, part in pairs)


# ---- what they share -------------------------------------------------------------------------------------------------


def log_softmax(logits_MV: Array, temperature: float = 1.0) -> Array:
    z = np.asarray(logits_MV, dtype=np.float64) / temperature
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def differences(function: Callable[[Array], Array], z_V: Array, step: float = 1e-4) -> Array:
    """[V]: central differences of fourth order of a function [M, V] -> [M]."""
    moves_VV = step * np.eye(len(z_V))

    def along(times: float) -> Array:
        return function(z_V + times * moves_VV)

    return (8 * (along(1) - along(-1)) - (along(2) - along(-2))) / (12 * step)


def _entropy(p: Array) -> float:
    return float(-sum(x * np.log(x) for x in p if x > 0))


def _open(config: Config, entropy_student: float, entropy_teacher: float) -> bool:
    """Whether the entropy gates of the config's mask let a row through."""
    gates = config.get("mask", {})
    for side, entropy in (("student_entropy", entropy_student), ("teacher_entropy", entropy_teacher)):
        gate = gates.get(side)
        if gate is not None and not gate.get("min", 0.0) <= entropy <= gate.get("max", np.inf):
            return False
    return True


def _row_of(
    config: Config, z_V: Array, temperature: float, function: Callable[[Array], Array], unclipped: float = np.nan
) -> Scores:
    """A row that is one function of its logits."""
    entropy, nan = _entropy(np.exp(log_softmax(z_V, temperature))), np.float64(np.nan)
    value, gradient = np.float64(function(z_V)), differences(function, z_V)
    row = Scores(value, gradient, np.float64(unclipped), gradient, nan, np.float64(entropy), nan, nan, nan)
    return row if _open(config, entropy, np.nan) else _shut(row)


def _shut(row: Scores) -> Scores:
    return Scores(*(0.0 * getattr(row, field.name) for field in fields(Scores)))


def _stack(rows: list[Scores]) -> Scores:
    return Scores(*(np.stack([getattr(row, field.name) for row in rows]) for field in fields(Scores)))
