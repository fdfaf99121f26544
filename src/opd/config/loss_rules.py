"""Rules about the loss: what it says of itself (`contradictions`, also for `opd.loss.build`), and within a recipe."""

from __future__ import annotations

from collections.abc import Iterator

from opd.config.faults import Fault
from opd.config.findings import Rule, Warning_
from opd.config.formula import losses_of, on_policy
from opd.config.loss import (
    DivergenceConfig,
    EntropyGate,
    JSDConfig,
    LossConfig,
    MaskConfig,
    MixConfig,
    PartConfig,
    PerEntryClip,
    SampledReverseKLConfig,
    SFTConfig,
)
from opd.config.schema import Recipe

# ---- of the loss alone -----------------------------------------------------------------------------------------------


def contradictions(loss: LossConfig, gated: LossConfig | None = None) -> Iterator[Fault]:
    """What a loss says and cannot mean, whoever uses it.

    Args:
        loss: as configured.
        gated: what the entropy gates of its mask look at, where that is a part of it; default: all of it.
    """
    if isinstance(loss, MixConfig):
        yield from _parts_leave_it_to_the_mix(loss)
        yield from _baselines_agree(loss)
    yield from _mask_keeps_something(loss.mask)
    yield from _gates_open(loss.mask)
    yield from _gates_can_see(loss.mask, loss if gated is None else gated)


def _parts_leave_it_to_the_mix(mix: MixConfig) -> Iterator[Fault]:
    for number, part in enumerate(mix.parts):
        own = {"mask": part.loss.mask != MaskConfig(), "reduction": part.loss.reduction != "token"}
        for key in (key for key, is_set in own.items() if is_set):
            yield Fault(
                f"`loss.parts.{number}.loss.{key}` is set",
                "the parts of a mix are summed token by token, so they count the same tokens in the same way",
                f"set loss.{key} instead",
            )


def _baselines_agree(mix: MixConfig) -> Iterator[Fault]:
    """A token has one baseline, so all parts that subtract it must mean the same advantage."""
    meant = {
        (part.loss.temperature, part.loss.discount)
        for part in mix.parts
        if isinstance(part.loss, SampledReverseKLConfig) and part.loss.group_baseline
    }
    if len(meant) > 1:
        yield Fault(
            "two parts of the mix have a `group_baseline` of different advantages",
            "their temperature or discount differ",
            "give both the same temperature and discount, or leave one of the two out",
        )


def _mask_keeps_something(mask: MaskConfig) -> Iterator[Fault]:
    if mask.skip_boundary and mask.first == 1 and mask.last is None:
        yield Fault(
            "`loss.mask` leaves out every token",
            "first: 1 keeps the first token after the prompt alone, and skip_boundary leaves that one out",
            "set loss.mask.first=2 or more, or loss.mask.skip_boundary=false",
        )


def _gates(mask: MaskConfig) -> Iterator[tuple[str, EntropyGate]]:
    for name, gate in (("teacher_entropy", mask.teacher_entropy), ("student_entropy", mask.student_entropy)):
        if gate is not None:
            yield f"loss.mask.{name}", gate


def _gates_open(mask: MaskConfig) -> Iterator[Fault]:
    for where, gate in _gates(mask):
        if gate.max is None:
            if gate.min == 0:
                yield Fault(
                    f"`{where}` leaves nothing out",
                    "no entropy is below 0, and the gate has no max",
                    f"set {where}.min or {where}.max, or {where}=null",
                )
        elif gate.min > gate.max:
            yield Fault(
                f"`{where}` leaves out every token",
                f"min {gate.min:g} is above max {gate.max:g}",
                f"set {where}.min to at most {where}.max",
            )
        elif gate.max == 0:
            yield Fault(
                f"`{where}` leaves out every token",
                "max is 0, and no distribution of a language model has no entropy at all",
                f"set {where}.max=0.1, or another bound in nats",
            )


def _gates_can_see(mask: MaskConfig, loss: LossConfig) -> Iterator[Fault]:
    parts = losses_of(loss)
    if mask.teacher_entropy is not None and not any(isinstance(part, DivergenceConfig) for part in parts):
        yield Fault(
            "`loss.mask.teacher_entropy` cannot be computed",
            f"{' + '.join(part.name for part in parts)} never sees the teacher's whole distribution",
            "set loss.mask.teacher_entropy=null, use loss.mask.student_entropy, or a divergence such as reverse_kl",
        )
    temperatures = {1.0 if isinstance(part, SFTConfig) else part.temperature for part in parts}
    if len(temperatures) > 1 and any(_gates(mask)):
        yield Fault(
            "an entropy gate of `loss.mask` has no temperature",
            f"it is the loss's, and the parts of the mix have {', '.join(f'{t:g}' for t in sorted(temperatures))}",
            "give all parts the same temperature, or leave out the gate",
        )


# ---- within a recipe -------------------------------------------------------------------------------------------------


def parts_of(recipe: Recipe) -> list[tuple[str, PartConfig]]:
    """The losses of a recipe, each with where it stands: one, or the parts of a mix."""
    if isinstance(recipe.loss, MixConfig):
        return [(f"loss.parts.{number}.loss", part.loss) for number, part in enumerate(recipe.loss.parts)]
    return [("loss", recipe.loss)]


def jsd_weight_is_inside(recipe: Recipe) -> Iterator[Fault | Warning_]:
    """The ends of the generalised Jensen-Shannon divergence are zero, not the KLs that GKD's code puts there."""
    for where, loss in parts_of(recipe):
        if not isinstance(loss, JSDConfig) or 0 < loss.teacher_weight < 1:
            continue
        what = f"`{where}.teacher_weight` is {loss.teacher_weight:g}, outside the open interval (0, 1)"
        ends = {0.0: ("KL(teacher‖student)", "forward_kl"), 1.0: ("KL(student‖teacher)", "reverse_kl")}
        if loss.teacher_weight not in ends:
            yield Fault(what, "a weight of a mixture lies between 0 and 1", f"set {where}.teacher_weight=0.5")
            continue
        divergence, name = ends[loss.teacher_weight]
        yield Fault(
            what,
            "there the divergence is zero whatever the models say; GKD's code puts "
            f"{divergence} in its place, which has a name of its own",
            f"set {where}.name={name}, or a weight such as {where}.teacher_weight=0.5",
        )


def clip_is_meant(recipe: Recipe) -> Iterator[Fault | Warning_]:
    """The published clip does not do what its name says."""
    for where, loss in parts_of(recipe):
        if isinstance(loss, DivergenceConfig) and isinstance(loss.clip, PerEntryClip):
            yield Warning_(
                f"{where}.clip.name=per_entry, the clip of OPSD",
                "clamped before the sum, the loss can be negative, and the teacher's favourite token can be pushed "
                "down",
                f"Use {where}.clip.name=weight unless you reproduce that paper",
            )


def sampling_suits_loss(recipe: Recipe) -> Iterator[Fault | Warning_]:
    """A sampled-token objective is an expectation under the student: what is sampled has to be that distribution."""
    rollout = recipe.rollout
    for where, loss in parts_of(recipe):
        if not isinstance(loss, SampledReverseKLConfig):
            continue
        if rollout.temperature == 0:
            yield Fault(
                f"loss `{loss.name}` needs sampled completions",
                "rollout.temperature=0 is greedy, and one fixed completion estimates no expectation",
                f"set rollout.temperature=1, or {where}.name=reverse_kl",
            )
            continue
        if loss.importance is None and rollout.temperature != loss.temperature:
            yield Warning_(
                f"rollout.temperature={rollout.temperature:g} and {where}.temperature={loss.temperature:g}",
                "tokens are drawn from another distribution than the one whose KL is estimated, so the estimate is "
                "biased",
                f"Make them equal, or correct with {where}.importance.clip=2",
            )
        if rollout.top_p < 1 or rollout.top_k is not None or rollout.min_p > 0:
            yield Warning_(
                "rollout.top_p, top_k or min_p cut the distribution that is sampled",
                "tokens outside are never seen, so the estimate of the KL is biased",
                "Set rollout.top_p=1, rollout.top_k=null and rollout.min_p=0",
            )


def solutions_have_company(recipe: Recipe) -> Iterator[Fault | Warning_]:
    """`sft` is on the problems' own solutions: it can join an on-policy loss, and is none itself."""
    if on_policy(recipe.loss) is None:
        what = "loss `sft` alone" if isinstance(recipe.loss, SFTConfig) else "a mix of nothing but `sft`"
        yield Fault(
            f"{what} is not on-policy distillation",
            "it trains on the problems' own solutions, and every step of this loop samples completions and has a "
            "teacher score them, for nothing",
            "add it to a divergence: loss={name: mix, parts: [{loss: {name: forward_kl}, weight: 1}, "
            "{loss: {name: sft}, weight: 0.1}]}; for solutions alone use a trainer for supervised fine-tuning",
        )


def loss_means_something(recipe: Recipe) -> Iterator[Fault | Warning_]:
    """The loss does not contradict itself; its gates look at sampled completions, not at given solutions."""
    yield from contradictions(recipe.loss, on_policy(recipe.loss))


def mask_fits_completions(recipe: Recipe) -> Iterator[Fault | Warning_]:
    """A mask leaves something of a completion, and does not count past its end."""
    mask, limit = recipe.loss.mask, recipe.rollout.max_new_tokens
    if mask.skip_boundary and limit == 1:
        yield Fault(
            "`loss.mask.skip_boundary` leaves out every token",
            "rollout.max_new_tokens is 1, and the only token of a completion is the first after the prompt",
            "set loss.mask.skip_boundary=false, or raise rollout.max_new_tokens",
        )
    for name, number in (("first", mask.first), ("last", mask.last)):
        if number is not None and number > limit:
            yield Warning_(
                f"loss.mask.{name}={number} and rollout.max_new_tokens={limit}",
                "no completion is that long, so the mask leaves nothing out",
                f"Set loss.mask.{name} below {limit}, or to null",
            )


def baseline_has_a_group(recipe: Recipe) -> Iterator[Fault | Warning_]:
    """A baseline of the other completions needs other completions."""
    for where, loss in parts_of(recipe):
        if isinstance(loss, SampledReverseKLConfig) and loss.group_baseline and recipe.rollout.num_samples < 2:
            yield Fault(
                f"`{where}.group_baseline` has no group",
                "rollout.num_samples is 1, so a problem has no other completion to compare with",
                f"set rollout.num_samples=2 or more, or {where}.group_baseline=false",
            )


RULES: tuple[Rule, ...] = (
    solutions_have_company,
    loss_means_something,
    mask_fits_completions,
    baseline_has_a_group,
    jsd_weight_is_inside,
    clip_is_meant,
    sampling_suits_loss,
)
