"""Checks of the Triton kernel, for a process of its own: `python tests/triton_cases.py interpret | compile`.

A process of its own since Triton decides at import whether it interprets, and since the suite's import hook, which
checks shapes at run time, must not wrap functions that Triton compiles.
"""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any

# N supervised tokens, V vocabulary, D hidden size.
N, V, D = 5, 37, 6
CLIPS: tuple[dict[str, Any], ...] = (
    {"name": "none"},
    {"name": "per_token", "max": 0.5},
    {"name": "weight", "max": 0.5},
)


def interpret() -> int:
    """Values, gradients and metrics with the kernel, run by Triton's interpreter, equal those without it."""
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    from opd.loss import Full, Head, build, fused

    fused._BLOCK = 16
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    cases = list(
        itertools.product(fused._KINDS, CLIPS, ((1.0, None, 1.0), (1.7, 3.0, 0.7)), (torch.float32, torch.bfloat16))
    )
    for name, clip, (temperature, softcap, scale), dtype in cases:
        config = {
            "name": name,
            "clip": clip,
            "temperature": temperature,
            "scale_by_temperature_squared": softcap == 3.0,
        }
        hidden, weight = draw(N, D).to(dtype), draw(V + 3, D).to(dtype)
        teacher_logits = draw(N, V)
        teacher_logits[1, :20] = -torch.inf  # the whole first block
        teacher = Full(teacher_logits, None)
        found: list[Any] = []
        for on in ("1", "0"):
            os.environ["TRITON_INTERPRET"] = on
            x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
            head = Head(w, softcap=softcap, scale=scale, vocab_size=V)
            loss = build(config, chunk_bytes=2 * 4 * V * 3).linear(x, head, teacher)
            loss.values.sum().backward()
            assert x.grad is not None
            assert w.grad is not None
            found.append({"values": loss.values.detach(), "d_hidden": x.grad, "d_weight": w.grad, **loss.metrics})
        tolerance = 1e-5 if dtype == torch.float32 else 5e-2
        assert set(found[0]) == set(found[1])
        for key in found[0]:
            limit = 1e-4 if key.startswith(("grad_", "entropy_")) else tolerance
            torch.testing.assert_close(found[0][key], found[1][key], rtol=limit, atol=limit, msg=f"{config}: {key}")
    return len(cases)


def compile_() -> int:
    """The kernel compiles to machine code for two generations of GPUs; none is needed for that."""
    import triton  # pyright: ignore[reportMissingImports]
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

    from opd.loss import fused

    constants = ("KIND", "CLIP", "SOFTCAP", "ZERO", "BLOCK")
    integers = ("s_row", "s_token", "t_row", "t_token", "num_tokens")
    targets = itertools.product((80, 90), ("fp32", "bf16"), fused._KINDS.values())
    count = 0
    for capability, dtype, kind in targets:
        signature = {
            name: "constexpr"
            if name in constants
            else f"*{dtype}"
            if name in ("s_ptr", "t_ptr")
            else "*fp32"
            if name.endswith("_ptr")
            else "i32"
            if name in integers
            else "fp32"
            for name in fused._rows.arg_names
        }
        values = {"KIND": kind, "CLIP": kind % 3, "SOFTCAP": kind % 2 == 1, "ZERO": -1e4, "BLOCK": 4096}
        source = ASTSource(fused._rows, signature, values)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        assert compiled.asm["cubin"]
        count += 1
    return count


if __name__ == "__main__":
    print({"interpret": interpret, "compile": compile_}[sys.argv[1]]())
