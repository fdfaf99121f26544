"""Seeds that depend on what they are for, not on the order in which things happen to run."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from the parts, e.g. (run seed, "rollout", step, problem id, sample index).

    Stable across runs, machines and Python versions, so that a resumed, re-sharded or re-ordered run samples the same.
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
