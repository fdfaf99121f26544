"""What training is going to need beyond the models that are loaded already."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from opd import forward
from opd.diagnose.diagnosis import CheckResult
from opd.diagnose.probe import Probe
from opd.memory import free_bytes

_GB = 1e9
# Bytes kept for the backward pass, per token and hidden unit of one layer, with 16-bit activations and an attention
# that stores no [T, T]: Korthikanti et al. (arXiv 2205.05198), eq. 1 without its attention term. float32 doubles it.
_ACTIVATION_BYTES = 34
# With gradient checkpointing a layer keeps its input alone.
_CHECKPOINTED_BYTES = 2


@dataclass(frozen=True)
class Memory:
    """Bytes to come. Optimizer state is exact; activations and cache are estimates from the model's shape."""

    optimizer_bytes: int
    activation_bytes: int
    cache_bytes: int

    @property
    def total_bytes(self) -> int:
        """The peak: the sampler's cache and the backward pass never exist at once."""
        return self.optimizer_bytes + max(self.activation_bytes, self.cache_bytes)


def expected_memory(probe: Probe) -> CheckResult:
    """Gradients, AdamW's moments, one micro-batch's activations and the sampler's cache, against what is free."""
    memory = estimate(probe)
    free = free_bytes(probe.student.device)
    detail = (
        f"GB still to come, of {free / _GB:.2f} free: gradients and AdamW {memory.optimizer_bytes / _GB:.2f}, then the "
        f"larger of one micro-batch's activations (about {memory.activation_bytes / _GB:.2f}) and the sampler's cache "
        f"(about {memory.cache_bytes / _GB:.2f})"
    )
    figure, limit = memory.total_bytes / _GB, free / _GB
    if memory.optimizer_bytes > free:
        advice = "The optimizer alone does not fit: train an adapter (student.adapter.name=lora) or a smaller model."
        return CheckResult("expected memory", (), figure, limit, "fail", detail, advice)
    if memory.total_bytes > 0.9 * free:
        advice = (
            "It may not fit: lower train.micro_batch_tokens or rollout.batch_size (neither changes the result), or set "
            "student.gradient_checkpointing=true."
        )
        return CheckResult("expected memory", (), figure, limit, "warn", detail, advice)
    return CheckResult("expected memory", (), figure, limit, "pass", detail)


def estimate(probe: Probe) -> Memory:
    """The bytes that a run of this recipe allocates after its models are loaded."""
    recipe, student = probe.parts.recipe, probe.student
    # One gradient and two moments for each trained weight, in the weight's own dtype (float32).
    optimizer = 3 * sum(parameter.nbytes for parameter in student.trained().values())

    shape: Any = forward.base_model(student.model).config.get_text_config()
    width = student.dtype.itemsize
    pairs, solutions = probe.parts.pairs, probe.parts.solutions
    length = max(len(pair.student_ids) for pair in pairs) + recipe.rollout.max_new_tokens
    given = [len(pair.student_ids) + len(solutions[pair.problem.id]) for pair in pairs if solutions]
    num_samples = recipe.train.num_problems_per_step * recipe.rollout.num_samples
    # A sequence is never cut, so the longest one is a micro-batch of its own when it exceeds the budget.
    micro_batch_tokens = min(max(recipe.train.micro_batch_tokens, length), num_samples * length)
    micro_batch_tokens = max(micro_batch_tokens, *given, 0)
    kept = _CHECKPOINTED_BYTES if recipe.student.gradient_checkpointing else _ACTIVATION_BYTES
    activations = micro_batch_tokens * shape.num_hidden_layers * shape.hidden_size * kept * width // 2

    heads = shape.num_attention_heads
    head_size = getattr(shape, "head_dim", None) or shape.hidden_size // heads
    kv_heads = getattr(shape, "num_key_value_heads", None) or heads
    side_by_side = min(recipe.rollout.batch_size, num_samples)
    cache = 2 * side_by_side * length * shape.num_hidden_layers * kv_heads * head_size * width
    return Memory(optimizer, activations, cache)
