"""A model's output head as plain tensors, proven against the model's own logits.

Tensor suffixes: B sequences, T tokens, N supervised tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from opd.errors import OpdError
from opd.forward import base_model, body_of, eval_mode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Largest difference from the model's own logits, as a share of the largest logit. A head is one product and a few
# elementwise operations: what is left is the rounding of the dtype, a few units of which the model may spend on a
# scale or softcap in half precision that is done in float32 here.
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
_PROBE_SHAPE_BT = (2, 8)


@dataclass(frozen=True, eq=False)
class LowRank:
    """A low-rank addition to a head's product: scale · (hidden @ down.T) @ up.T (LoRA, arXiv 2106.09685).

    Args:
        down: [r, D].
        up: [rows, r].
        scale: LoRA's alpha / r.
    """

    down: Tensor
    up: Tensor
    scale: float = 1.0


@dataclass(frozen=True, eq=False)
class Head:
    """logits = softcap · tanh(scale · (hidden @ weight.T + low rank + bias) / softcap), the softcap where there is one.

    The tensors are the model's own, not copies: the head follows the model as it trains.

    Args:
        weight: [rows, D], any float dtype.
        bias: [rows], or None.
        scale: what the product is multiplied with (Cohere's ``logit_scale``, one over Granite's ``logits_scaling``).
        softcap: Gemma's ``final_logit_softcapping``, or None.
        vocab_size: rows at or past it do not exist for this head (padding of the embedding matrix); None keeps all.
        low_rank: adapters on the head; each adds its product and receives its gradient.

    Raises:
        OpdError: a scale or softcap that is not a usable number, or a `vocab_size` larger than the matrix.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    vocab_size: int | None = None
    low_rank: tuple[LowRank, ...] = ()

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale) or self.scale == 0:
            raise _unusable(f"scale is {self.scale}", "pass a finite scale other than 0")
        if self.softcap is not None and not (math.isfinite(self.softcap) and self.softcap > 0):
            raise _unusable(f"softcap is {self.softcap}", "pass a finite softcap above 0, or None")
        if self.vocab_size is not None and not 1 <= self.vocab_size <= self.weight.shape[0]:
            why = f"vocab_size is {self.vocab_size} and the matrix has {self.weight.shape[0]} rows"
            raise _unusable(why, "pass the size of the tokenizer that belongs to this model")

    @property
    def num_tokens(self) -> int:
        """V: outcomes that the head tells apart."""
        return self.weight.shape[0] if self.vocab_size is None else self.vocab_size

    @property
    def is_plain(self) -> bool:
        """Whether the product with the weight is all there is."""
        return self.bias is None and self.scale == 1.0 and self.softcap is None and not self.low_rank

    # Cut at use, not once: a slice made under no_grad would carry no gradient, and one made earlier would go stale.
    @property
    def weight_VD(self) -> Tensor:
        """The rows of the matrix that count, [V, D]."""
        return self.weight[: self.num_tokens]

    @property
    def bias_V(self) -> Tensor | None:
        """The entries of the bias that count, [V], or None."""
        return None if self.bias is None else self.bias[: self.num_tokens]

    @property
    def factors(self) -> tuple[Tensor, ...]:
        """[V, D] the weight, and [V, r] for each adapter: the product is Σ inputs[i] @ factors[i].T."""
        return (self.weight_VD, *(low.up[: self.num_tokens] for low in self.low_rank))

    def inputs(self, hidden_ND: Float[Tensor, "*N D"]) -> tuple[Tensor, ...]:
        """What meets each of `factors`: [N, D] the hidden states, and [N, r] for each adapter; differentiable."""
        with torch.autocast(hidden_ND.device.type, enabled=False):
            return (
                hidden_ND,
                *(hidden_ND.to(low.down.dtype) @ low.down.T * low.scale for low in self.low_rank),
            )

    def logits(self, hidden_ND: Float[Tensor, "*N D"]) -> Float[Tensor, "*N V"]:
        """Logits in float32 (float64 for a float64 weight), differentiable; products run in the weights' dtypes.

        Args:
            hidden_ND: [N, D] last hidden states, any number of leading dimensions.
        """
        with torch.autocast(hidden_ND.device.type, enabled=False):
            dtype, logits = statistics_dtype(self.weight), torch.empty(0)
            for number, (x_ND, factor_VD) in enumerate(zip(self.inputs(hidden_ND), self.factors, strict=True)):
                product = nn.functional.linear(x_ND.to(factor_VD.dtype), factor_VD).to(dtype)
                logits = logits + product if number else product
            if self.bias_V is not None:
                logits = logits + self.bias_V
            logits = logits * self.scale if self.scale != 1.0 else logits
            return logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap

    def finish(self, product_vN: Float[Tensor, "v N"], tile: slice) -> None:
        """Turn a tile of the product, vocabulary-major, into logits in place: bias, scale, softcap."""
        if self.bias is not None:
            product_vN.add_(self.bias[tile, None])
        if self.softcap is not None:
            product_vN.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap)
        elif self.scale != 1.0:
            product_vN.mul_(self.scale)

    def slope(self, logits_NV: Float[Tensor, "N V"]) -> Tensor | float:
        """d(logits)/d(product + bias): [N, V], or one number for all when there is no softcap."""
        if self.softcap is None:
            return self.scale
        return (logits_NV / self.softcap).square_().neg_().add_(1.0).mul_(self.scale)

    @classmethod
    def from_model(cls, model: nn.Module, vocab_size: int | None = None) -> Head:
        """The head of a causal language model, under the adapter state that the model is in.

        Proves itself: on a small batch of random ids its logits are compared with the model's own.

        Args:
            model: a transformers causal model, or a peft model around one.
            vocab_size: the number of tokens of the tokenizer; rows past it are cut.

        Raises:
            OpdError: LoRA on the head, an unknown kind of head, or logits that differ from the model's own.
        """
        base = base_model(model)
        weight, bias = _output_matrix(base)
        config: Any = base.config.get_text_config()
        head = cls(
            weight,
            bias,
            scale=float(getattr(config, "logit_scale", None) or 1.0)
            / float(getattr(config, "logits_scaling", None) or 1.0),
            softcap=getattr(config, "final_logit_softcapping", None),
            vocab_size=vocab_size,
        )
        _prove(head, model)
        return head


def statistics_dtype(tensor: Tensor) -> torch.dtype:
    """float32, or float64 where the input is float64 already."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _unusable(why: str, fix: str) -> OpdError:
    return OpdError("The output head cannot be used.", why=why, fix=fix)


def _output_matrix(base: PreTrainedModel) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of the layer that makes logits; OpdError for a layer that is more than that."""
    output = base.get_output_embeddings()
    kind = type(output).__name__
    if output is None:
        raise _unusable(f"{type(base).__name__} has no output embeddings", "pass a causal language model")
    if hasattr(output, "base_layer") or hasattr(output, "token_adapter"):
        raise _unusable(
            f"an adapter sits on the output layer ({kind}), so its logits are not one product with one matrix",
            "leave lm_head out of student.adapter.target_modules, or train every weight: student.adapter.name=full",
        )
    weight: object = getattr(output, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or weight.dtype not in _TOLERANCE:
        shown = f"{weight.dtype} {tuple(weight.shape)}" if isinstance(weight, Tensor) else repr(weight)
        raise _unusable(
            f"the output layer ({kind}) holds no plain matrix: {shown}", "load the model without quantising lm_head"
        )
    return weight, cast("Tensor | None", getattr(output, "bias", None))


@torch.no_grad()
def _prove(head: Head, model: nn.Module) -> None:
    """Compare with the model's own logits; one forward, so that both start from the same hidden states."""
    body, hidden_states = body_of(model), list[Tensor]()

    def keep(_module: nn.Module, _args: Any, output: Any) -> None:
        hidden_states.append(output[0])

    # A generator of its own: where in a run a head is built must not change what the run draws.
    ids_BT = torch.randint(head.num_tokens, _PROBE_SHAPE_BT, generator=torch.Generator().manual_seed(0))
    ids_BT = ids_BT.to(head.weight.device)
    hook = body.register_forward_hook(keep)
    try:
        with eval_mode(model), torch.autocast(ids_BT.device.type, enabled=False):
            output: Any = model(input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT), use_cache=False)
    finally:
        hook.remove()
    if len(hidden_states) != 1:
        raise _unusable(
            f"{type(body).__name__} ran {len(hidden_states)} times in one forward of the model, not once",
            "use a decoder-only causal model",
        )
    own: Tensor = output.logits[..., : head.num_tokens].to(statistics_dtype(head.weight))
    difference = (head.logits(hidden_states[0]) - own).abs().max().item()
    limit = _TOLERANCE[head.weight.dtype] * own.abs().max().item()
    if not difference <= limit:  # a NaN is a failure too
        raise OpdError(
            "The output head does not give the model's own logits.",
            why=f"they differ by up to {difference:.3g}, and rounding in {head.weight.dtype} explains {limit:.3g}: "
            f"{type(base_model(model)).__name__} does more between its last hidden state and its logits than "
            f"scale {head.scale:g} and softcap {head.softcap}",
            fix="build Head(weight, bias, scale=..., softcap=...) by hand, or use Loss.tokens on the model's logits",
        )
