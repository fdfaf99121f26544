"""Which tokens are supervised: from places, ids and how a completion ended, never from a pad or end id by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiny
from opd.align import MaskedIdentity, identity, token_facts
from opd.config.loss import MaskConfig
from opd.loss.mask import TokenFacts, supervised
from opd.types import Alignment, Completion, FinishReason, Problem, PromptPair, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL, SPACE, STOP = 90, 80, 99
FACTS = TokenFacts(special_ids=frozenset({SPECIAL, STOP}), whitespace_ids=frozenset({SPACE}))


def kept(ids: list[int], *, stopped: bool = False, **mask: Any) -> list[int]:
    """The supervised positions, after checks that hold for every mask."""
    alignment = supervised(ids, stopped, MaskConfig(**mask), FACTS)
    assert alignment.teacher_positions == alignment.student_positions
    assert sorted([*alignment.student_positions, *alignment.drop_reasons]) == list(range(len(ids)))
    return list(alignment.student_positions)


def reasons(ids: list[int], *, stopped: bool = False, **mask: Any) -> dict[int, str]:
    return dict(supervised(ids, stopped, MaskConfig(**mask), FACTS).drop_reasons)


def test_no_mask_keeps_every_token() -> None:
    assert kept([SPECIAL, SPACE, 1, STOP], stopped=True) == [0, 1, 2, 3]
    assert reasons([SPECIAL, SPACE, 1, STOP], stopped=True) == {}


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ({"first": 2}, [0, 1]),
        ({"last": 2}, [3, 4]),
        ({"first": 2, "last": 2}, [0, 1, 3, 4]),
        ({"first": 3, "last": 4}, [0, 1, 2, 3, 4]),  # they overlap: each token once
        ({"first": 9}, [0, 1, 2, 3, 4]),
        ({"last": 9}, [0, 1, 2, 3, 4]),
        ({"skip_boundary": True}, [1, 2, 3, 4]),
        ({"first": 2, "skip_boundary": True}, [1]),
        ({"last": 1, "skip_boundary": True}, [4]),
    ],
)
def test_places_count_from_the_first_token_after_the_prompt(mask: dict[str, Any], expected: list[int]) -> None:
    assert kept([1, 2, 3, 4, 5], **mask) == expected


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ({}, [0]),
        ({"first": 1, "last": 1}, [0]),
        ({"skip_boundary": True}, []),
        ({"skip_special_tokens": True, "skip_whitespace": True}, [0]),
        ({"last": 1, "skip_boundary": True}, []),
    ],
)
def test_a_completion_of_one_token(mask: dict[str, Any], expected: list[int]) -> None:
    """It stopped at once: the stop token is the boundary too."""
    assert kept([STOP], stopped=True, **mask) == expected


def test_special_tokens_but_the_one_that_ended_the_completion() -> None:
    ids = [SPECIAL, 1, STOP, 2, STOP]
    assert kept(ids, stopped=True, skip_special_tokens=True) == [1, 3, 4]
    assert reasons(ids, stopped=True, skip_special_tokens=True) == {0: "special token", 2: "special token"}
    # Cut at the limit: the last token is one like any other, although its id can stop a completion.
    assert kept(ids, stopped=False, skip_special_tokens=True) == [1, 3]


def test_white_space_but_a_stop_token_that_is_white_space() -> None:
    assert kept([SPACE, 1, SPACE], stopped=False, skip_whitespace=True) == [1]
    assert kept([SPACE, 1, SPACE], stopped=True, skip_whitespace=True) == [1, 2]


def test_each_token_is_left_out_for_one_reason() -> None:
    mask = {"first": 2, "last": 2, "skip_boundary": True, "skip_special_tokens": True, "skip_whitespace": True}
    assert reasons([SPECIAL, SPACE, SPACE, 1, SPECIAL, STOP], stopped=True, **mask) == {
        0: "boundary",
        1: "white space",
        2: "outside first and last",
        3: "outside first and last",
        4: "special token",
    }


@given(
    ids=st.lists(st.sampled_from([1, 2, SPACE, SPECIAL, STOP]), min_size=1, max_size=12),
    first=st.none() | st.integers(1, 15),
    last=st.none() | st.integers(1, 15),
    skip_special_tokens=st.booleans(),
    skip_whitespace=st.booleans(),
)
def test_the_stop_token_counts_exactly_once_wherever_its_place_counts(ids: list[int], **mask: Any) -> None:
    ids = [*ids, STOP]
    expected = not (mask["first"] is not None and mask["last"] is None and mask["first"] < len(ids))
    assert kept(ids, stopped=True, **mask).count(len(ids) - 1) == expected


# ---- with a tokenizer ------------------------------------------------------------------------------------------------


def align(ids: list[int], finish: FinishReason, tokenizer: PreTrainedTokenizerFast, **mask: Any) -> Alignment:
    pair = PromptPair(Problem("p", "q"), (1,), (1,), "", "")
    completion = Completion(tuple(ids), (0.0,) * len(ids), (0.0,) * len(ids), finish)
    return MaskedIdentity(MaskConfig(**mask), tokenizer, len(tokenizer))(Rollout(pair, completion, 0, 0))


def test_without_a_mask_the_alignment_is_the_identity(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    pair = PromptPair(Problem("p", "q"), (1,), (1,), "", "")
    rollout = Rollout(pair, Completion((5, 6, 2), (0.0,) * 3, (0.0,) * 3, "stop"), 0, 0)
    assert MaskedIdentity(MaskConfig(), tiny_tokenizer, len(tiny_tokenizer))(rollout) == identity(rollout)


def test_pad_equal_to_eos_makes_no_difference(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """A stop token is supervised once although its id is the padding's; one in a cut completion is a special token."""
    eos = tiny_tokenizer.eos_token_id
    assert tiny_tokenizer.pad_token_id == eos
    ids = [*tiny_tokenizer.encode("Add 12"), eos]
    mask = {"skip_special_tokens": True, "skip_whitespace": True}
    stopped, cut = (align(ids, finish, tiny_tokenizer, **mask) for finish in ("stop", "length"))
    assert stopped.student_positions == (*cut.student_positions, len(ids) - 1)
    assert cut.drop_reasons[len(ids) - 1] == "special token"


def test_white_space_is_what_decodes_to_nothing_else(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    facts = token_facts(MaskConfig(skip_whitespace=True), tiny_tokenizer, len(tiny_tokenizer))
    found = {tiny_tokenizer.decode([token_id]) for token_id in facts.whitespace_ids}
    assert {" ", "\n", "\t", "\r"} <= found
    assert all(text.isspace() for text in found)
    rest = set(range(len(tiny_tokenizer))) - facts.whitespace_ids
    assert not any(tiny_tokenizer.decode([token_id]).isspace() for token_id in rest)
    assert facts.special_ids == frozenset()  # read only for a mask that asks


def test_a_space_that_decoding_alone_would_drop_is_white_space() -> None:
    """Tokenizers of the sentencepiece kind write a leading space as `▁` and drop it at the start of a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast as Fast

    vocabulary = {"<s>": 0, "▁": 1, "a": 2, "▁a": 3, "▁▁": 4, "<0x0A>": 5, "▁b": 6}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    fast = Fast(tokenizer_object=tokenizer, bos_token="<s>")
    assert not fast.decode([1]).isspace()
    mask = MaskConfig(skip_whitespace=True, skip_special_tokens=True)
    assert token_facts(mask, fast, len(fast)) == TokenFacts(frozenset({0}), frozenset({1, 4, 5}))


def test_special_tokens_are_those_of_the_tokenizer(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    facts = token_facts(MaskConfig(skip_special_tokens=True), tiny_tokenizer, len(tiny_tokenizer))
    assert facts.special_ids == set(tiny_tokenizer.convert_tokens_to_ids(list(tiny.SPECIAL_TOKENS)))
    assert facts.whitespace_ids == frozenset()
