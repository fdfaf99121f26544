"""Which student positions meet which teacher positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opd.config.loss import MaskConfig
from opd.loss.mask import TokenFacts, supervised
from opd.types import Alignment, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def identity(rollout: Rollout) -> Alignment:
    """One tokenizer: every completion token meets itself, the stop token included when one was sampled."""
    positions = tuple(range(len(rollout.completion.ids)))
    return Alignment(student_positions=positions, teacher_positions=positions)


class MaskedIdentity:
    """One tokenizer: every completion token that the mask keeps meets itself.

    Args:
        mask: which tokens count.
        tokenizer: whose ids are sampled; read once, here.
        num_tokens: size of its vocabulary.
    """

    def __init__(self, mask: MaskConfig, tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> None:
        self._mask = mask
        self._facts = token_facts(mask, tokenizer, num_tokens)

    def __call__(self, rollout: Rollout) -> Alignment:
        """The supervised positions of a completion, and why each of the others is left out."""
        completion = rollout.completion
        return supervised(completion.ids, completion.finish_reason == "stop", self._mask, self._facts)


def token_facts(mask: MaskConfig, tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> TokenFacts:
    """What this mask asks of a vocabulary, and nothing else: decoding a large one takes a second or two."""
    special = _special_ids(tokenizer) if mask.skip_special_tokens else frozenset[int]()
    return TokenFacts(special, _whitespace_ids(tokenizer, num_tokens) if mask.skip_whitespace else frozenset())


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids))


def _whitespace_ids(tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> frozenset[int]:
    """Decoded behind a letter: alone, some tokenizers drop a leading space, and the whole token with it."""
    (letter, *_) = tokenizer.encode("a", add_special_tokens=False)
    pairs = [[letter, token_id] for token_id in range(num_tokens)]
    texts = tokenizer.batch_decode(pairs, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    before = tokenizer.decode([letter], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return frozenset(token_id for token_id, text in enumerate(texts) if text[len(before) :].isspace())
