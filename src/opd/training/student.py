"""The model that samples and learns: trained parameters, head, and its weights at other times (initial, merged)."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from opd.config.schema import LoraConfig, ModelConfig, StudentConfig
from opd.errors import OpdError
from opd.forward import body_of, completion_hidden
from opd.loss.head import Head
from opd.models import LoadedModel, load


class StudentBody(nn.Module):
    """The student's decoder as the module that is prepared for several processes: ids in, hidden states [N, D] out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids_BT: Tensor, rows_N: Tensor) -> Tensor:
        """Hidden states [N, D] that predict the completion tokens; see `opd.forward.pad_right`."""
        return completion_hidden(body_of(self.model), ids_BT, rows_N)


class Student:
    """The student model with its trained weights in float32 and products in the recipe's dtype.

    Args:
        loaded: model and tokenizer as loaded; peft wraps the model in place when `config.adapter` is LoRA.
        config: the recipe's student section.
        seed: of the adapter's initial weights.
    """

    def __init__(self, loaded: LoadedModel, config: StudentConfig, *, seed: int) -> None:
        self.loaded = loaded
        self.config = config
        self.dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        self.model: nn.Module = loaded.model
        if isinstance(config.adapter, LoraConfig):
            self.model = _add_lora(loaded.model, config.adapter, seed)
        else:
            _let_every_embedding_learn(loaded.model)
        if config.gradient_checkpointing:
            loaded.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.module = StudentBody(self.model)
        self.head = Head.from_model(self.model, vocab_size=loaded.vocab_size)
        self.device = self.head.weight.device

    @property
    def has_adapter(self) -> bool:
        """Whether the initial weights are the model with its adapter off."""
        return isinstance(self.config.adapter, LoraConfig)

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that learn, by name, in a fixed order."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of the trained parameters."""
        return {name: parameter.detach().clone() for name, parameter in self.trained().items()}

    @contextmanager
    def using(self, weights: Mapping[str, Tensor]) -> Generator[None]:
        """The trained parameters hold `weights` inside, and their own values afterwards, to the bit."""
        trained = self.trained()
        own = {name: parameter.data for name, parameter in trained.items()}
        try:
            for name, parameter in trained.items():
                parameter.data = weights[name]
            yield
        finally:
            for name, parameter in trained.items():
                parameter.data = own[name]

    @contextmanager
    def adapter_off(self) -> Generator[None]:
        """The initial weights, and `head` without what an adapter adds: only where training is through an adapter."""
        assert self.has_adapter
        head = self.head
        try:
            with self.model.disable_adapter():  # pyright: ignore[reportCallIssue, reportGeneralTypeIssues, reportUnknownVariableType]
                self.head = head.reread(self.model)
                yield
        finally:
            self.head = head

    @contextmanager
    def merged(self) -> Generator[None]:
        """The adapter folded into copies of the weights it adapts; the weights themselves are never written to.

        Folding in place and unfolding again would leave rounding errors of bfloat16 in the base model at every step.
        """
        from peft.tuners.lora import Linear as LoraLinear
        from peft.tuners.tuners_utils import BaseTunerLayer

        adapted = [module for module in self.model.modules() if isinstance(module, BaseTunerLayer)]
        layers = [module for module in adapted if isinstance(module, LoraLinear)]
        if len(layers) < len(adapted):
            others = sorted({type(module).__name__ for module in adapted} - {LoraLinear.__name__})
            raise OpdError(
                "This adapter cannot be merged for sampling.",
                why=f"It sits on other layers than linear ones ({', '.join(others)}), which would be left out.",
                fix="Set rollout.merge_adapter=false, or leave those layers out of student.adapter.target_modules.",
            )
        linears = [cast(nn.Linear, layer.get_base_layer()) for layer in layers]
        own = [linear.weight for linear in linears]
        try:
            for layer, linear, weight in zip(layers, linears, own, strict=True):
                delta: Tensor = layer.get_delta_weight(layer.active_adapters[0])
                # A parameter of its own: a head's may be the embedding's too, which has no adapter.
                merged = (weight.data.float() + delta.float()).to(weight.dtype)
                linear.weight = nn.Parameter(merged, requires_grad=False)
            with self.adapter_off():
                yield
        finally:
            for linear, weight in zip(linears, own, strict=True):
                linear.weight = weight

    def save(self, folder: Path) -> None:
        """Adapter or full weights in the layout that peft and transformers load."""
        # peft's default would ask a hub whether the base model's embeddings were resized; they never are here.
        options = {"save_embedding_layers": False} if self.has_adapter else {}
        self.model.save_pretrained(folder, **options)  # pyright: ignore[reportCallIssue]


def load_student(config: StudentConfig, *, device: torch.device, seed: int) -> Student:
    """Load the student. Full fine-tuning keeps float32 weights and computes in the recipe's dtype."""
    fields = {name: getattr(config, name) for name in ModelConfig.model_fields}
    if not isinstance(config.adapter, LoraConfig):
        fields["dtype"] = "float32"
    return Student(load(ModelConfig(**fields), device=device), config, seed=seed)


def _let_every_embedding_learn(model: nn.Module) -> None:
    """Where padding and EOS share an id, `padding_idx` would keep EOS from learning; no pad is attended to here."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None


def _add_lora(model: nn.Module, adapter: LoraConfig, seed: int) -> nn.Module:
    import peft

    targets = adapter.target_modules if isinstance(adapter.target_modules, str) else list(adapter.target_modules)
    config = peft.LoraConfig(
        r=adapter.r,
        lora_alpha=adapter.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=adapter.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(seed)
    try:
        with warnings.catch_warnings():
            # peft asks transformers for `is_gradient_checkpointing`, a name on its way out: nothing a user could do.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
            # It also warns of a head that is the embedding too, since merging in place would change both: see `merged`.
            warnings.filterwarnings("ignore", message=".*tie_word_embeddings=True")
            return peft.get_peft_model(model, config)  # pyright: ignore[reportArgumentType]
    except ValueError as error:
        raise OpdError(
            f"LoRA could not be added to {type(model).__name__}.",
            why=str(error),
            fix="Set student.adapter.target_modules to names of linear layers of this model, or to all-linear.",
        ) from error
