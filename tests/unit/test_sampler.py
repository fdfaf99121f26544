"""The sampler on tiny models: the tokens of transformers' own loop, the learner's log-probabilities, a seed each."""

from __future__ import annotations

import pytest
import torch

import tiny
from opd.config.schema import SamplingConfig
from opd.errors import OpdError
from opd.forward import body_of, score_hidden
from opd.loss.head import Head
from opd.rollout.hf import HfSampler
from opd.types import Completion

CPU = torch.device("cpu")
NUM_TOKENS = 60  # of 64 rows: the last four are padding of the embedding matrix
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13], [5, 6, 7, 8, 9, 10, 11], [20]]


def sampler(model: torch.nn.Module, *, stop_ids: frozenset[int] = frozenset({2})) -> HfSampler:
    return HfSampler(model, stop_ids=stop_ids, pad_id=2, vocab_size=NUM_TOKENS, dtype=torch.float32)


@pytest.mark.parametrize("architecture", list(tiny.ARCHITECTURES))
def test_greedy_gives_the_tokens_of_transformers_own_loop(architecture: str):
    model = tiny.ARCHITECTURES[architecture](64)
    found = sampler(model).generate(PROMPTS, [0] * 4, SamplingConfig(max_new_tokens=12, temperature=0))
    for prompt, completion in zip(PROMPTS, found, strict=True):
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=12,
            do_sample=False,
            suppress_tokens=list(range(NUM_TOKENS, 64)),
        )[0, len(prompt) :]
        assert list(completion.ids) == expected.tolist()


@pytest.mark.parametrize("architecture", list(tiny.ARCHITECTURES))
@pytest.mark.parametrize(
    "sampling", [SamplingConfig(max_new_tokens=9), SamplingConfig(max_new_tokens=9, temperature=0.7, top_p=0.8)]
)
def test_log_probabilities_are_the_learners(architecture: str, sampling: SamplingConfig):
    model = tiny.ARCHITECTURES[architecture](64)
    found = sampler(model).generate(PROMPTS, [1, 2, 3, 4], sampling)
    hidden = score_hidden(
        body_of(model), PROMPTS, [completion.ids for completion in found], pad_id=2, max_tokens=10**6, device=CPU
    )
    logp = (Head.from_model(model, vocab_size=NUM_TOKENS).logits(hidden) / sampling.temperature).log_softmax(-1)
    ids = torch.tensor([token for completion in found for token in completion.ids])
    expected = logp.gather(1, ids[:, None]).squeeze(1)
    untruncated = torch.tensor([b + k for c in found for b, k in zip(c.behavior_logp, c.kept_logp, strict=True)])
    torch.testing.assert_close(untruncated, expected, atol=5e-5, rtol=5e-5)
    if sampling.top_p < 1:
        assert any(kept < 0 for completion in found for kept in completion.kept_logp)


def test_a_completion_depends_on_its_seed_and_not_on_its_batch():
    model = tiny.build_llama(64)
    settings = SamplingConfig(max_new_tokens=10)
    together = sampler(model).generate(PROMPTS, [1, 2, 3, 4], settings)
    one_by_one = sampler(model).generate(PROMPTS, [1, 2, 3, 4], settings, batch_size=1)
    backwards = sampler(model).generate(PROMPTS[::-1], [4, 3, 2, 1], settings)[::-1]
    assert [c.ids for c in together] == [c.ids for c in one_by_one] == [c.ids for c in backwards]
    assert together[0].ids != together[2].ids  # the same prompt, another seed


def test_stopping_leaves_the_batch_and_the_rest_goes_on():
    model = tiny.build_llama(64)
    free = sampler(model).generate(PROMPTS, [1, 2, 3, 4], SamplingConfig(max_new_tokens=10))
    stop = free[1].ids[2]
    stopped = sampler(model, stop_ids=frozenset({stop})).generate(
        PROMPTS, [1, 2, 3, 4], SamplingConfig(max_new_tokens=10)
    )
    for before, after in zip(free, stopped, strict=True):
        assert after.finish_reason == ("stop" if stop in before.ids else "length")
        end = before.ids.index(stop) + 1 if stop in before.ids else 10
        assert after.ids == before.ids[:end]
    assert "stop" in {c.finish_reason for c in stopped}


def test_rows_past_the_tokenizer_are_never_sampled():
    model = tiny.build_llama(64)
    with torch.no_grad():
        model.lm_head.weight[NUM_TOKENS:] = 10 * model.lm_head.weight[:4]
    found = sampler(model).generate(PROMPTS * 8, list(range(32)), SamplingConfig(max_new_tokens=8, temperature=3))
    assert all(token < NUM_TOKENS for completion in found for token in completion.ids)


def test_finished_batches_are_told_as_they_come():
    told: dict[int, Completion] = {}
    found = sampler(tiny.build_llama(64)).generate(
        PROMPTS,
        [1, 2, 3, 4],
        SamplingConfig(max_new_tokens=3),
        batch_size=3,
        on_batch=lambda indices, completions: told.update(zip(indices, completions, strict=True)),
    )
    assert [told[index] for index in range(4)] == found


def test_no_stop_id_is_refused():
    with pytest.raises(OpdError, match="no stop id"):
        sampler(tiny.build_llama(64), stop_ids=frozenset())


def test_an_empty_prompt_is_refused():
    with pytest.raises(OpdError, match="empty"):
        sampler(tiny.build_llama(64)).generate([[1], []], [1, 2], SamplingConfig())
