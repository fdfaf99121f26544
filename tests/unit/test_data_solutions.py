"""A problem's own solution as the completion that the student's prompt asks for."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast as Fast

import tiny
from opd.config.schema import ContextConfig, PromptConfig
from opd.data.chat import Chat, SpecialTokenError
from opd.data.render import Renderer
from opd.errors import OpdError
from opd.types import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ASKED = [{"role": "user", "content": "12+35"}]
PREFILLED = tiny.CHAT_TEMPLATE.replace("assistant\n' }}", "assistant\n<think>\n' }}")


def answer_ids(tokenizer: PreTrainedTokenizerFast, answer: str) -> tuple[int, ...]:
    return Chat(tokenizer, None, side="student").answer_ids(ASKED, answer, "p:1")


def with_template(tokenizer: PreTrainedTokenizerFast, template: str) -> PreTrainedTokenizerFast:
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


@pytest.mark.parametrize("answer", ["47", "It is 47.\nSo \\boxed{47}", " 47", ""])
def test_it_ends_with_the_turns_stop_token_and_nothing_after(
    answer: str, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    ids = answer_ids(tiny_tokenizer, answer)
    assert tiny_tokenizer.decode(ids) == f"{answer}<|im_end|>"
    assert ids[-1] == tiny_tokenizer.eos_token_id
    sums = tiny.build_sums_tokenizer()  # asks for an answer with no generation prompt
    assert sums.decode(answer_ids(sums, answer)) == f"{answer}<eos>"


def test_prompt_and_solution_are_encoded_as_one_conversation(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    prompt_ids, _ = Chat(tiny_tokenizer, None, side="student").encode(ASKED, "p:1")
    messages = [*ASKED, {"role": "assistant", "content": "It is 47."}]
    whole = tiny_tokenizer.apply_chat_template(messages, return_dict=False)
    ids = answer_ids(tiny_tokenizer, "It is 47.")
    assert list(whole)[: len(prompt_ids) + len(ids)] == [*prompt_ids, *ids]


def test_a_special_token_in_it_is_refused_or_dropped(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(SpecialTokenError, match="im_end"):
        answer_ids(tiny_tokenizer, "47<|im_end|>48")
    problems = [Problem("a", "1+1", solution="2<|im_end|>", answer="2"), Problem("b", "1+2", solution="3", answer="3")]
    context = ContextConfig(name="answer_only")  # no prompt shows the solution
    rendered = {
        policy: Renderer(PromptConfig(), context, tiny_tokenizer, tiny_tokenizer, problems, 0, on_bad_row=policy)
        for policy in ("error", "drop")
    }
    assert len(rendered["error"].pairs(problems).pairs) == 2
    with pytest.raises(SpecialTokenError, match="problem a"):
        rendered["error"].pairs(problems, solutions=True)
    kept = rendered["drop"].pairs(problems, solutions=True)
    assert [pair.problem.id for pair in kept.pairs] == list(kept.solutions) == ["b"]
    assert [item.count for item in kept.dropped.values()] == [1]


def test_a_prompt_that_no_answer_continues_is_refused(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """The template opens a thinking part when asking, and writes given answers without one."""
    assert PREFILLED != tiny.CHAT_TEMPLATE
    with pytest.raises(OpdError, match="p:1: its solution cannot follow the student's prompt") as caught:
        answer_ids(with_template(tiny_tokenizer, PREFILLED), "47")
    assert "<think>" in caught.value.why


def test_a_template_that_does_not_end_turns_is_refused(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(OpdError, match="nothing ends its solution") as caught:
        answer_ids(with_template(tiny_tokenizer, tiny.CHAT_TEMPLATE.replace("<|im_end|>", "")), "47")
    assert "47" in caught.value.why


def merging(decoder: decoders.Decoder, pre_tokenizer: pre_tokenizers.PreTokenizer, *, dummy: bool) -> Fast:
    """A tokenizer in which the prompt's last character and an answer's first make one token."""
    vocabulary = {token: number for number, token in enumerate([*"12345+=7", "<eos>", "=7", "▁"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("=", "7")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoder
    fast = Fast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.chat_template = tiny.SUMS_CHAT_TEMPLATE
    assert ("▁" in fast.convert_ids_to_tokens(fast.encode("7", add_special_tokens=False))) == dummy
    return fast


def test_a_token_across_the_end_of_the_prompt_is_split() -> None:
    """The student's prompt ends before it, and so does every completion that it samples."""
    tokenizer = merging(decoders.Fuse(), pre_tokenizers.Split("x", "isolated"), dummy=False)
    whole = tokenizer.encode("12+35=74<eos>", add_special_tokens=False)
    assert tokenizer.convert_tokens_to_ids("=7") in whole
    assert tokenizer.convert_ids_to_tokens(list(answer_ids(tokenizer, "74"))) == ["7", "4", "<eos>"]


def test_a_solution_that_encoding_alone_would_change_is_refused() -> None:
    """Encoded by itself it gets a leading space, as tokenizers of the sentencepiece kind do."""
    tokenizer = merging(decoders.Metaspace(), pre_tokenizers.Metaspace(), dummy=True)
    with pytest.raises(OpdError, match="cannot be encoded by itself"):
        answer_ids(tokenizer, "74")
