"""The one-file example and the library are the same method: equal ids, rows and losses on the same batch."""

from __future__ import annotations

import copy
import importlib.util
import math
import random
from pathlib import Path
from types import ModuleType
from typing import Literal

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from opd.config.schema import SamplingConfig
from opd.forward import body_of, completion_hidden, pad_right
from opd.loss import Full, Head, build
from opd.models import LoadedModel
from opd.rollout.hf import HfSampler

PATH = Path(__file__).parents[2] / "examples" / "opd_in_one_file.py"
CPU = torch.device("cpu")


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("opd_in_one_file", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


one_file = _load()


@pytest.fixture
def model(tiny_model: PreTrainedModel) -> PreTrainedModel:
    """A tiny Llama with the example's own LoRA in it, moved away from zero so that student and teacher differ."""
    model = copy.deepcopy(tiny_model)
    torch.manual_seed(3)
    for parameter in one_file.add_lora(model, rank=4, alpha=8.0):
        torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.fixture
def batch() -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """(student prompts, teacher prompts, completions) of unequal lengths; id 2 is EOS and padding at once."""
    rng = random.Random(7)

    def ids(length: int) -> list[int]:
        return [rng.randrange(3, 300) for _ in range(length)]

    completions = [[*ids(5), 2], ids(9), [2], [*ids(3), 2]]
    return [ids(n) for n in (6, 11, 4, 8)], [ids(n) for n in (21, 17, 30, 9)], completions


def _library_hidden(model: PreTrainedModel, prompts: list[list[int]], completions: list[list[int]]) -> Tensor:
    ids_BT, rows_N = pad_right(prompts, completions, 2, CPU)
    return completion_hidden(body_of(model), ids_BT, rows_N)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_losses_and_gradients_equal_the_librarys(
    model: PreTrainedModel,
    batch: tuple[list[list[int]], list[list[int]], list[list[int]]],
    direction: Literal["forward", "reverse"],
) -> None:
    student_prompts, teacher_prompts, completions = batch
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    with torch.no_grad(), one_file.adapter_off(model):
        teacher_NV = one_file.completion_logits(model, teacher_prompts, completions)
        teacher = Full(_library_hidden(model, teacher_prompts, completions), Head.from_model(model))
    mine_N = one_file.token_kl(one_file.completion_logits(model, student_prompts, completions), teacher_NV, direction)
    mine = torch.autograd.grad(mine_N.sum() / len(mine_N), trained)

    hidden_ND = _library_hidden(model, student_prompts, completions)
    loss = build({"name": f"{direction}_kl"}).linear(hidden_ND, Head.from_model(model), teacher)
    theirs = torch.autograd.grad(loss.values.sum() / sum(map(len, completions)), trained)

    assert len(mine_N) == sum(map(len, completions))
    assert mine_N.detach().min() > 1e-3, "a batch on which student and teacher agree would prove nothing"
    torch.testing.assert_close(mine_N, loss.values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_the_two_directions_are_different_and_zero_for_equal_distributions() -> None:
    torch.manual_seed(0)
    student_NV, teacher_NV = torch.randn(5, 11), torch.randn(5, 11)
    close = {"rtol": 1e-5, "atol": 1e-6}
    p, q = teacher_NV.double().softmax(-1), student_NV.double().softmax(-1)
    torch.testing.assert_close(one_file.token_kl(student_NV, teacher_NV).double(), (p * (p / q).log()).sum(-1), **close)
    torch.testing.assert_close(
        one_file.token_kl(student_NV, teacher_NV, "reverse").double(), (q * (q / p).log()).sum(-1), **close
    )
    assert one_file.token_kl(student_NV, student_NV).abs().max() == 0


def test_adapter_off_is_the_model_before_training(model: PreTrainedModel, tiny_model: PreTrainedModel) -> None:
    ids_BT = torch.arange(3, 20)[None]
    with torch.no_grad():
        with one_file.adapter_off(model):
            assert torch.equal(model(ids_BT).logits, tiny_model(ids_BT).logits)
        assert not torch.allclose(model(ids_BT).logits, tiny_model(ids_BT).logits, atol=1e-2)


def test_a_fresh_adapter_changes_nothing_and_leaves_the_head_alone(tiny_model: PreTrainedModel) -> None:
    model, ids_BT = copy.deepcopy(tiny_model), torch.arange(3, 20)[None]
    trained = one_file.add_lora(model)
    with torch.no_grad():
        assert torch.equal(model(ids_BT).logits, tiny_model(ids_BT).logits)
    assert len(trained) == 2 * 7 * model.config.num_hidden_layers
    assert type(model.get_output_embeddings()) is torch.nn.Linear


def test_samples_do_not_depend_on_left_padding_and_stop_at_stop_ids(
    model: PreTrainedModel,
    batch: tuple[list[list[int]], list[list[int]], list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = batch[0]
    # The most likely token in place of a random one: then a completion is a function of weights and prompt alone.
    monkeypatch.setattr(torch, "multinomial", lambda probability_BV, _count: probability_BV.argmax(-1, keepdim=True))
    together = one_file.sample(model, prompts, {2}, 12)
    assert together == [one_file.sample(model, [prompt], {2}, 12)[0] for prompt in prompts]

    sampler = HfSampler(
        model, stop_ids=frozenset({2}), pad_id=2, vocab_size=model.config.vocab_size, dtype=torch.float32
    )
    library = sampler.generate(prompts, [0] * len(prompts), SamplingConfig(max_new_tokens=12, temperature=0))
    assert together == [list(completion.ids) for completion in library]

    stop = together[0][3]
    stopped = one_file.sample(model, prompts, {stop}, 12)[0]
    assert stopped == together[0][: together[0].index(stop) + 1]


def test_positions_count_real_tokens_alone(
    model: PreTrainedModel, batch: tuple[list[list[int]], list[list[int]], list[list[int]]]
) -> None:
    """Rotary embeddings forgive a constant shift up to rounding, so the positions themselves are looked at."""
    prompts, seen = batch[0], list[list[int]]()

    def look(_module: torch.nn.Module, _args: object, kwargs: dict[str, Tensor]) -> None:
        seen.append(kwargs["position_ids"][:, -1].tolist())

    with model.get_decoder().register_forward_pre_hook(look, with_kwargs=True):
        one_file.sample(model, prompts, set(), 3)
    assert seen == [[len(prompt) - 1 + step for prompt in prompts] for step in range(3)]


def test_held_out_pairs_never_occur_in_training_in_either_order() -> None:
    train, heldout = one_file.make_split()
    assert train
    assert heldout
    assert not {frozenset(q) for q in train} & {frozenset(q) for q in heldout}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("20 + 4 = \\boxed{24}", (True, True)),
        ("\\boxed{24} no, \\boxed{ 25 }", (False, True)),
        ("that is 24.", (False, True)),
        ("124 or 240", (False, False)),
        ("", (False, False)),
    ],
)
def test_grading(text: str, expected: tuple[bool, bool]) -> None:
    assert one_file.is_right(text, 20, 4) == expected


def test_the_whole_program_runs(tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one_file.main([str(tiny_model_folder), "--steps", "2", "--kl", "reverse"])
    lines = capsys.readouterr().out.splitlines()
    losses = [float(line.split()[2]) for line in lines if line.startswith("step ")]
    assert len(losses) == 2
    assert all(math.isfinite(loss) and loss > 0 for loss in losses)
    assert [line.split(":")[0] for line in lines if line.startswith("held-out")] == [
        "held-out, student before",
        "held-out, teacher",
        "held-out, student after",
    ]


def test_it_stays_one_readable_file() -> None:
    text = PATH.read_text()
    assert len(text.splitlines()) <= 220
    assert "import opd" not in text
    assert "peft" not in "".join(line for line in text.splitlines() if line.startswith(("import", "from")))


def test_the_tiny_tokenizer_reaches_every_part(tiny_loaded: LoadedModel) -> None:
    ids = tiny_loaded.tokenizer.apply_chat_template(
        one_file.teacher_messages(8, 13, [(2, 15), (4, 14)]), add_generation_prompt=True, return_dict=False
    )
    text = tiny_loaded.tokenizer.decode(ids)
    assert text.count("<|im_start|>assistant") == 3
    assert text.count("8 + 13 = 21. The answer is \\boxed{21}.") == 1
    assert text.count("4 + 14 = 18. The answer is \\boxed{18}.") == 2
