"""Logits of a chunk of rows, walked through the vocabulary tile by tile.

On a CPU logits are stored vocabulary-major, [V, N], and shown as their transpose [N, V]: a tile of the vocabulary is
then one piece of memory, the product of a tile of the weight with a few rows runs at the speed of a large product, and
everything elementwise happens in buffers that stay in the cache. On a GPU they are stored row by row.

Tensor suffixes: N rows of the chunk, V vocabulary, v one tile of it, K chosen tokens of each row, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from opd.loss.head import Head, statistics_dtype

# A logit of −inf counts as the largest of its row less 10,000: 0·log 0 is 0, and a divergence that is infinite (one
# side excludes what the other expects) is large and finite, with a finite gradient that leads away from it. No other
# row is touched.
LOG_ZERO = -1e4

# Rows of the weight that one product takes: enough to run at full speed, and few enough to stay in the cache meanwhile.
_PRODUCT_TOKENS = 4096
# A logit that no real one is below, for tokens that a sum leaves out: finite, so that a tile of nothing else is no NaN.
_LEFT_OUT = -1e30


def is_row_major(device: torch.device) -> bool:
    """How logits lie in memory: token by token for each row on a GPU, where a row is a program's work."""
    return device.type != "cpu"


class Scratch:
    """[N, v] buffers by name, made when first asked for and used again for every later tile and chunk.

    Tensors made anew for every tile would cost as much as the arithmetic on them.
    """

    def __init__(self, max_rows: int, tile_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tile_size, self.dtype, self._max_rows, self._device = tile_size, dtype, max_rows, device
        self._row_major = is_row_major(device)
        self._made: dict[str, Tensor] = {}

    def take(self, name: str, num_rows: int, width: int) -> Tensor:
        """[num_rows, width] of a buffer, uninitialised; the same memory for the same name."""
        if name not in self._made:
            # One column more than a tile: where `put` sends the tokens that lie in other tiles.
            shape = (self.tile_size + 1) * self._max_rows
            self._made[name] = torch.empty(shape, dtype=self.dtype, device=self._device)
        if self._row_major:
            return self._made[name].view(self._max_rows, self.tile_size + 1)[:num_rows, :width]
        return self._made[name][: width * num_rows].view(width, num_rows).T


@dataclass(frozen=True)
class Stats:
    """Of a softmax over each row, all [N, 1]: the largest logit/τ, log Σ exp(logit/τ − that), the entropy in nats, and
    the first token of the tile in which the largest logit lies.

    The two parts of the normaliser are subtracted one after the other: their sum would round at the size of the logits.
    """

    maximum: Tensor
    log_sum: Tensor
    entropy: Tensor
    place: Tensor


class Logits:
    """One model's logits for a chunk of rows, after scale and softcap, before any temperature.

    Args:
        storage_VN: [V, N]; overwritten by the gradient in the end.
        scratch: where tiles are worked on.
    """

    def __init__(self, storage_VN: Tensor, scratch: Scratch) -> None:
        self.storage_VN, self.scratch = storage_VN, scratch
        self.num_tokens, self.num_rows = storage_VN.shape
        self._stats: dict[float, Stats] = {}

    def tiles(self) -> Iterator[slice]:
        """Consecutive slices of the vocabulary."""
        for start in range(0, self.num_tokens, self.scratch.tile_size):
            yield slice(start, min(start + self.scratch.tile_size, self.num_tokens))

    def fill(self, inputs: Sequence[Float[Tensor, "N _"]], head: Head | None) -> Logits:
        """Compute the logits from the inputs of the head's factors, or copy them in when there is no head."""
        if head is None:
            self.storage_VN.copy_(inputs[0].T)
            return self
        factors = [(x_ND.to(weight.dtype).T, weight) for x_ND, weight in zip(inputs, head.factors, strict=True)]
        for start in range(0, self.num_tokens, _PRODUCT_TOKENS):
            tile = slice(start, min(start + _PRODUCT_TOKENS, self.num_tokens))
            out_vN = self.storage_VN[tile]
            for number, (x_DN, weight_VD) in enumerate(factors):
                if number == 0 and out_vN.dtype == weight_VD.dtype:
                    torch.mm(weight_VD[tile], x_DN, out=out_vN)
                elif number == 0:
                    out_vN.copy_(torch.mm(weight_VD[tile], x_DN))
                else:
                    out_vN.add_(torch.mm(weight_VD[tile], x_DN))
            head.finish(out_vN, tile)
        return self

    def scaled(self, tile: slice, temperature: float, into: str) -> Float[Tensor, "N v"]:
        """logits/τ of a tile, in the named buffer."""
        out_Nv = self.scratch.take(into, self.num_rows, tile.stop - tile.start).copy_(self.storage_VN[tile].T)
        return out_Nv if temperature == 1.0 else out_Nv.div_(temperature)

    def log_prob(self, tile: slice, temperature: float, into: str) -> Float[Tensor, "N v"]:
        """log softmax(logits/τ) of a tile, in the named buffer."""
        z_Nv = self._read(tile, temperature, into)
        out_Nv = self.scratch.take(into, *z_Nv.shape)
        stats = self.stats(temperature)
        return torch.sub(z_Nv, stats.maximum, out=out_Nv).sub_(stats.log_sum)

    def _read(self, tile: slice, temperature: float, into: str) -> Float[Tensor, "N v"]:
        """logits/τ of a tile to look at: the stored ones where they are what is asked for, else in the named buffer."""
        if temperature == 1.0 and self.storage_VN.dtype == self.scratch.dtype:
            return self.storage_VN[tile].T
        return self.scaled(tile, temperature, into)

    def stats(self, temperature: float) -> Stats:
        """Normaliser and entropy of softmax(logits/τ); a logit of −inf becomes the largest plus `LOG_ZERO`."""
        if temperature not in self._stats:
            stats = self._measure(temperature)
            # An outcome of probability zero makes its row's entropy NaN (0 · −inf): a look at N numbers saves a pass.
            if not bool(stats.entropy.isfinite().all()):
                self._replace_infinite()
                stats = self._measure(temperature)
            self._stats[temperature] = stats
        return self._stats[temperature]

    def rest(self, ids_NK: Int[Tensor, "N K"], temperature: float) -> Float[Tensor, "N 1"]:
        """log of the probability of all tokens of each row that are not among its `ids`."""
        stats = self.stats(temperature)
        rest = self._measure(temperature, without_NK=ids_NK)
        return (rest.maximum - stats.maximum) + (rest.log_sum - stats.log_sum)

    def _measure(self, temperature: float, without_NK: Tensor | None = None) -> Stats:
        """One pass: maximum m, Σ e^(z−m) and Σ (z−m) e^(z−m), rescaled whenever the maximum grows."""
        maximum = total = weighted = place = torch.empty(0)
        for tile in self.tiles():
            if without_NK is None:
                z_Nv = self._read(tile, temperature, "z")
            else:
                z_Nv = self.scaled(tile, temperature, "z")
                put(z_Nv, self.scratch, "z", without_NK, tile, _LEFT_OUT)
            here = row_max(z_Nv)
            top = torch.maximum(maximum, here) if tile.start else here
            z_Nv = torch.sub(z_Nv, top, out=self.scratch.take("z", *z_Nv.shape))
            e_Nv = torch.exp(z_Nv, out=self.scratch.take("e", *z_Nv.shape))
            here_total, here_weighted = row_sum(e_Nv), row_sum(z_Nv.mul_(e_Nv))
            if tile.start:
                shift = maximum - top
                kept = shift.exp()
                total, weighted = kept * total + here_total, kept * (weighted + shift * total) + here_weighted
                place = torch.where(here > maximum, tile.start, place)
            else:
                total, weighted, place = here_total, here_weighted, torch.zeros_like(top, dtype=torch.int64)
            maximum = top
        log_sum = total.log()
        return Stats(maximum, log_sum, log_sum - weighted / total, place)

    def _replace_infinite(self) -> None:
        top_1N = self.storage_VN.amax(0, keepdim=True)
        for tile in self.tiles():
            stored_vN = self.storage_VN[tile]
            torch.where(stored_vN == -torch.inf, top_1N + LOG_ZERO, stored_vN, out=stored_vN)

    def likeliest(self, temperature: float) -> Int[Tensor, "N 1"]:
        """The likeliest token of each row, the first of several; looked for in the tile that has the maximum alone."""
        place_N1 = self.stats(temperature).place
        width = min(self.scratch.tile_size, self.num_tokens)
        ids_NK = (place_N1 + torch.arange(width, device=place_N1.device)).clamp_(max=self.num_tokens - 1)
        return place_N1 + self.at(ids_NK).argmax(-1, keepdim=True)

    def at(self, ids_NK: Int[Tensor, "N K"]) -> Float[Tensor, "N K"]:
        """Logits of some tokens of each row."""
        return self.storage_VN.gather(0, ids_NK.T).T.to(self.scratch.dtype)

    def log_prob_at(self, ids_NK: Int[Tensor, "N K"], temperature: float) -> Float[Tensor, "N K"]:
        """log softmax(logits/τ) of some tokens of each row."""
        stats, at_NK = self.stats(temperature), self.at(ids_NK)
        return (at_NK if temperature == 1.0 else at_NK.div_(temperature)) - stats.maximum - stats.log_sum

    def top(self, k: int) -> Int[Tensor, "N K"]:
        """The k likeliest tokens of each row, likeliest first; of several that are equal the first, for any tile."""
        best_NK = ids_NK = torch.empty(0, device=self.storage_VN.device)
        for tile in self.tiles():
            found_NK, places_NK = self.storage_VN[tile].T, torch.arange(tile.start, tile.stop, device=ids_NK.device)
            places_NK = places_NK.expand_as(found_NK)
            found_NK, order_NK = _first_of_equals(found_NK, k)
            places_NK = places_NK.gather(-1, order_NK)
            if tile.start:
                found_NK, places_NK = torch.cat([best_NK, found_NK], -1), torch.cat([ids_NK, places_NK], -1)
                found_NK, order_NK = _first_of_equals(found_NK, k)
                places_NK = places_NK.gather(-1, order_NK)
            best_NK, ids_NK = found_NK, places_NK
        return ids_NK


def _first_of_equals(values_NK: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row and their places, of equals the leftmost; `topk` alone takes any of them.

    Half precision has many equal logits. Ordered by value, then from the left, by one whole number for each entry.
    """
    k = min(k, values_NK.shape[-1])
    if values_NK.dtype == torch.float64:
        values_NK, order_NK = values_NK.sort(dim=-1, descending=True, stable=True)
        return values_NK[:, :k], order_NK[:, :k]
    # −0 and 0 are equal, so they become one. The bits of a float32 are in the order of its value, negative ones turned.
    bits_NK = (values_NK.float() + 0.0).contiguous().view(torch.int32).to(torch.int64)
    rank_NK = torch.where(bits_NK < 0, -(bits_NK & 0x7FFFFFFF), bits_NK)
    places_K = torch.arange(values_NK.shape[-1], device=values_NK.device)
    order_NK = ((rank_NK << 31) - places_K).topk(k, dim=-1).indices
    return values_NK.gather(-1, order_NK), order_NK


def row_sum(tile_Nv: Float[Tensor, "N v"]) -> Float[Tensor, "N 1"]:
    """Sum of each row of a tile."""
    return _blocks(tile_Nv).sum(1).sum(0)[:, None]


def row_max(tile_Nv: Float[Tensor, "N v"]) -> Float[Tensor, "N 1"]:
    """Largest entry of each row of a tile; NaN if one is."""
    return _blocks(tile_Nv).amax(1).amax(0)[:, None]


def row_square(tile_Nv: Float[Tensor, "N v"]) -> Float[Tensor, "N 1"]:
    """Sum of the squares of each row of a tile."""
    return torch.linalg.vector_norm(_blocks(tile_Nv), dim=1).square_().sum(0)[:, None]


def _blocks(tile_Nv: Float[Tensor, "N v"]) -> Float[Tensor, "threads part N"]:
    """A tile cut along the vocabulary into one piece for each thread: the piece which that thread has just written.

    Torch splits an elementwise operation over the memory of a tile, and a reduction over what remains, here the rows:
    then every thread would read what another one holds in its cache.
    """
    width = tile_Nv.shape[1]
    threads = torch.get_num_threads() if tile_Nv.device.type == "cpu" else 1
    return tile_Nv.T.unflatten(0, (threads if width % threads == 0 else 1, -1))


def put(tile_Nv: Tensor, scratch: Scratch, name: str, ids_NK: Tensor, tile: slice, value: float | Tensor) -> None:
    """Write a number at, or add [N, K] to, those of each row's tokens that lie in the tile that the buffer holds."""
    num_rows, width = tile_Nv.shape
    wide_Nv = scratch.take(name, num_rows, width + 1)
    local_NK = ids_NK - tile.start
    local_NK = torch.where((local_NK >= 0) & (local_NK < width), local_NK, width)
    if isinstance(value, Tensor):
        wide_Nv.scatter_add_(-1, local_NK, value)
    else:
        wide_Nv.scatter_(-1, local_NK, value)


def storage_dtype(head: Head | None, like: Tensor) -> torch.dtype:
    """What logits are kept in: as the product gives them when nothing follows it, else the dtype of statistics."""
    if head is None:
        return statistics_dtype(like)
    return head.weight.dtype if head.is_plain else statistics_dtype(head.weight)
