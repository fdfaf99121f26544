"""Which tokens of a completion are supervised, from its length, its ids and how it ended; no model, and no pad id.

The entropy gates of `loss.mask` look at distributions, so they act inside the losses (`opd.loss.gate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opd.config.loss import MaskConfig
from opd.types import Alignment


@dataclass(frozen=True)
class TokenFacts:
    """What masks must know of a vocabulary; empty sets where no mask asks. `opd.align.token_facts` reads a tokenizer.

    Args:
        special_ids: control tokens.
        whitespace_ids: tokens whose text is white space and nothing else.
    """

    special_ids: frozenset[int] = frozenset()
    whitespace_ids: frozenset[int] = frozenset()


def supervised(ids: Sequence[int], stopped: bool, mask: MaskConfig, facts: TokenFacts) -> Alignment:
    """The supervised positions of one completion, and why each of the others is not.

    Positions count from 0 at the first token after the prompt, whatever else is left out: `first: 2` and
    `skip_boundary` together keep position 1 alone. The stop token is what the student has to learn about when to end,
    so neither its being special nor its being white space leaves it out; its place may.

    Args:
        ids: the sampled ids; a stop token ends them when `stopped`.
        stopped: whether the completion ended by itself. One that was cut at the length limit has no stop token.
        mask: which tokens count.
        facts: of the vocabulary that the ids are from.
    """
    reasons: dict[int, str] = {}
    for position, token in enumerate(ids):
        is_stop = stopped and position == len(ids) - 1
        reason = _by_place(position, len(ids), mask) or (None if is_stop else _by_token(token, mask, facts))
        if reason is not None:
            reasons[position] = reason
    kept = tuple(position for position in range(len(ids)) if position not in reasons)
    return Alignment(student_positions=kept, teacher_positions=kept, drop_reasons=reasons)


def _by_place(position: int, length: int, mask: MaskConfig) -> str | None:
    among_first = mask.first is not None and position < mask.first
    among_last = mask.last is not None and position >= length - mask.last
    everywhere = mask.first is None and mask.last is None
    if not (everywhere or among_first or among_last):
        return "outside first and last"
    return "boundary" if mask.skip_boundary and position == 0 else None


def _by_token(token: int, mask: MaskConfig, facts: TokenFacts) -> str | None:
    if mask.skip_special_tokens and token in facts.special_ids:
        return "special token"
    return "white space" if mask.skip_whitespace and token in facts.whitespace_ids else None
