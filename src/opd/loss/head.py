"""A model's output head as plain tensors: products, adapters, bias, scale and softcap.

`opd.loss.model_head` reads one from a loaded model and proves it against the model's own logits.

Tensor suffixes: N supervised tokens, V vocabulary, v a tile of it, D hidden size, r rank of an adapter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from opd.errors import OpdError


@dataclass(frozen=True, eq=False)
class LowRank:
    """A low-rank addition to a head's product: scale · ((hidden @ down.T) @ up.T + bias) (LoRA, arXiv 2106.09685).

    Args:
        down: [r, D], peft's ``lora_A``.
        up: [rows, r], peft's ``lora_B``.
        scale: LoRA's alpha / r, or alpha / √r where it is rank-stabilised.
        bias: [rows], or None (peft's ``lora_bias``).
    """

    down: Tensor
    up: Tensor
    scale: float = 1.0
    bias: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Head:
    """logits = softcap · tanh(scale · (hidden @ weight.T + bias + low rank) / softcap), the softcap where there is one.

    The tensors are the model's own, not copies: the head follows the model as it trains. Which of them take part is
    settled when it is built; where adapters are switched on, off or merged afterwards, see `reread`.

    Args:
        weight: [rows, D], any float dtype.
        bias: [rows], or None.
        scale: what the product is multiplied with (Cohere's ``logit_scale``, one over Granite's ``logits_scaling``).
        softcap: Gemma's ``final_logit_softcapping``, or None.
        vocab_size: rows at or past it do not exist for this head (padding of the embedding matrix); None keeps all.
        low_rank: adapters on the head; each adds its product and receives its gradient.

    Raises:
        OpdError: a scale or softcap that is not a usable number, a `vocab_size` larger than the matrix, or an adapter
            or bias of another shape.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    vocab_size: int | None = None
    low_rank: tuple[LowRank, ...] = ()

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale) or self.scale == 0:
            raise unusable(f"scale is {self.scale}", "pass a finite scale other than 0")
        if self.softcap is not None and not (math.isfinite(self.softcap) and self.softcap > 0):
            raise unusable(f"softcap is {self.softcap}", "pass a finite softcap above 0, or None")
        if self.vocab_size is not None and not 1 <= self.vocab_size <= self.weight.shape[0]:
            why = f"vocab_size is {self.vocab_size} and the matrix has {self.weight.shape[0]} rows"
            raise unusable(why, "pass the size of the tokenizer that belongs to this model")
        num_rows, width = self.weight.shape
        for low in self.low_rank:
            if low.up.shape != (num_rows, low.down.shape[0]) or low.down.shape[1] != width:
                why = f"an adapter of {tuple(low.down.shape)} and {tuple(low.up.shape)} on {tuple(self.weight.shape)}"
                raise unusable(why, "pass LowRank(down [r, D], up [rows, r])")
            if not math.isfinite(low.scale):
                raise unusable(f"an adapter's scale is {low.scale}", "pass a finite scale")
        for bias in self._biases():
            if bias.shape != (num_rows,):
                raise unusable(f"a bias of {tuple(bias.shape)} for {num_rows} rows", "pass one number for each row")

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
        return self._rows(self.weight)

    @property
    def bias_V(self) -> Tensor | None:
        """The entries of the bias that count, [V], with those of the adapters, or None; differentiable."""
        return self._bias(slice(self.num_tokens))

    @property
    def factors(self) -> tuple[Tensor, ...]:
        """[V, D] the weight, and [V, r] for each adapter: the product is Σ inputs[i] @ factors[i].T."""
        return (self.weight_VD, *(self._rows(low.up) for low in self.low_rank))

    def _rows(self, matrix: Tensor) -> Tensor:
        # A slice of everything is no slice: its gradient would be made once more, in a matrix of its own.
        return matrix if len(matrix) == self.num_tokens else matrix[: self.num_tokens]

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
        bias_V = self.bias_V
        with torch.autocast(hidden_ND.device.type, enabled=False):
            dtype, logits = statistics_dtype(self.weight), torch.empty(0)
            for number, (x_ND, factor_VD) in enumerate(zip(self.inputs(hidden_ND), self.factors, strict=True)):
                product = nn.functional.linear(x_ND.to(factor_VD.dtype), factor_VD).to(dtype)
                logits = logits + product if number else product
            if bias_V is not None:
                logits = logits + bias_V
            logits = logits * self.scale if self.scale != 1.0 else logits
            return logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap

    def finish(self, product_vN: Float[Tensor, "v N"], tile: slice) -> None:
        """Turn a tile of the product, vocabulary-major, into logits in place: bias, scale, softcap."""
        bias_v = self._bias(tile)
        if bias_v is not None:
            product_vN.add_(bias_v[:, None])
        if self.softcap is not None:
            product_vN.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap)
        elif self.scale != 1.0:
            product_vN.mul_(self.scale)

    def slope(self, logits_NV: Float[Tensor, "N V"]) -> Tensor | float:
        """d(logits)/d(product + bias): [N, V], or one number for all when there is no softcap."""
        if self.softcap is None:
            return self.scale
        return (logits_NV / self.softcap).square_().neg_().add_(1.0).mul_(self.scale)

    def reread(self, model: nn.Module) -> Head:
        """This head with the tensors that the model uses now.

        For a model whose adapters were switched on, off or merged since the head was proven: scale, softcap and size
        are the model's whatever its adapters do, so they stay, and nothing is run.

        Raises:
            OpdError: adapters that a head cannot hold; see `from_model`.
        """
        from opd.loss.model_head import output_tensors

        tensors = output_tensors(model)
        return replace(self, weight=tensors.weight, bias=tensors.bias, low_rank=tensors.low_rank)

    def detached(self) -> Head:
        """This head without gradients, as the tensors are now: it does not see parameters that get other `.data`."""
        bias = None if self.bias is None else self.bias.detach()
        low_rank = tuple(
            LowRank(low.down.detach(), low.up.detach(), low.scale, None if low.bias is None else low.bias.detach())
            for low in self.low_rank
        )
        return replace(self, weight=self.weight.detach(), bias=bias, low_rank=low_rank)

    @classmethod
    def from_model(cls, model: nn.Module, vocab_size: int | None = None) -> Head:
        """The head of a causal language model, under the adapter state that the model is in.

        Covers LoRA on the output layer (several adapters, rank-stabilised, with bias, merged, or switched off) and a
        copy of it that trains (peft's ``modules_to_save``). Proves itself: on a small batch of random ids its logits
        are compared with the model's own. Matrices B of fresh adapters are zero and say nothing in that comparison.

        Args:
            model: a transformers causal model, or a peft model around one.
            vocab_size: the number of tokens of the tokenizer; rows past it are cut.

        Raises:
            OpdError: an output layer or an adapter on it that is more than products, a bias, a scale and a softcap
                (quantised or transposed layers, DoRA and other variants and tuners, single trained tokens, dropout
                on the head of a model that trains), or logits that differ from the model's own.
        """
        from opd.loss.model_head import output_tensors, prove, scale_and_softcap

        tensors = output_tensors(model)
        scale, softcap = scale_and_softcap(model)
        head = cls(tensors.weight, tensors.bias, scale, softcap, vocab_size, tensors.low_rank)
        prove(head, model)
        return head

    def _biases(self) -> list[Tensor]:
        own = [] if self.bias is None else [self.bias]
        return own + [low.bias for low in self.low_rank if low.bias is not None]

    def _bias(self, rows: slice) -> Tensor | None:
        bias = None if self.bias is None else self.bias[rows]
        for low in self.low_rank:
            if low.bias is not None:
                part = low.bias[rows] * low.scale
                bias = part if bias is None else bias + part
        return bias


def statistics_dtype(tensor: Tensor) -> torch.dtype:
    """float32, or float64 where the input is float64 already."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def unusable(why: str, fix: str) -> OpdError:
    """The error for a head that cannot be built."""
    return OpdError("The output head cannot be used.", why=why, fix=fix)
