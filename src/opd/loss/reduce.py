"""The only division of the package: by what the *global* batch holds, over all micro-batches and ranks.

A micro-batch's share is a sum over its own rows divided by a number that all micro-batches have in common, so the
shares add up to the same loss and gradient however the batch was split. Losses never reduce.

Tensor suffixes: N supervised tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor


def global_mean(values_N: Float[Tensor, " N"], num_global_tokens: int, *, num_ranks: int = 1) -> Tensor | None:
    """This micro-batch's share of the mean over the supervised tokens of the global batch.

    Args:
        values_N: [N] nats.
        num_global_tokens: supervised tokens of all micro-batches on all ranks.
        num_ranks: over how many ranks gradients are averaged afterwards (DDP does): undone here.

    Returns:
        A scalar to call ``backward`` on, or None when the global batch supervises nothing: then there is no mean, and
        the step is to be skipped and reported as skipped.
    """
    if num_global_tokens == 0:
        return None
    return values_N.sum() * (num_ranks / num_global_tokens)


def global_sequence_mean(
    values_N: Float[Tensor, " N"],
    num_sequence_tokens_N: Int[Tensor, " N"],
    num_global_sequences: int,
    *,
    num_ranks: int = 1,
) -> Tensor | None:
    """This micro-batch's share of the mean over sequences of each sequence's mean over its tokens.

    Args:
        values_N: [N] nats.
        num_sequence_tokens_N: [N] for each row, how many supervised tokens its sequence has in the global batch.
        num_global_sequences: sequences of the global batch with at least one supervised token.
        num_ranks: as in `global_mean`.

    Returns:
        As `global_mean`.
    """
    if num_global_sequences == 0:
        return None
    return (values_N / num_sequence_tokens_N).sum() * (num_ranks / num_global_sequences)


def tokens_per_sequence(
    sequence_N: Int[Tensor, " N"], supervised_N: Float[Tensor, " N"] | None = None
) -> Int[Tensor, " N"]:
    """[N]: how many supervised tokens the sequence of each row has; at least 1, so that one divides by it.

    Args:
        sequence_N: [N] which sequence a row belongs to; all rows of a sequence are here.
        supervised_N: [N] 1 where an entropy gate left the row supervised, 0 where it did not; None without a gate.
    """
    _, index_N = sequence_N.unique(return_inverse=True)
    counted_N = torch.ones_like(index_N) if supervised_N is None else (supervised_N > 0).to(index_N.dtype)
    return torch.zeros_like(index_N).index_add(0, index_N, counted_N)[index_N].clamp(min=1)


def metric_sums(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Each metric summed over its rows in float64, to be added up over micro-batches and ranks."""
    return {name: metric_N.double().sum().item() for name, metric_N in metrics.items()}


def metric_means(sums: Mapping[str, float], num_global_tokens: int) -> dict[str, float]:
    """Sums over the global batch as means per supervised token; NaN when there was none."""
    return {name: total / num_global_tokens if num_global_tokens else math.nan for name, total in sums.items()}
