"""Rules about data: enough problems, and a held-out set that is held out."""

from __future__ import annotations

from collections.abc import Iterator

from opd.config.faults import Fault
from opd.config.findings import Rule, Warning_
from opd.config.schema import FileSource, HubSource, Recipe, Source, TaskSource

HELDOUT_FRAC = "heldout_frac"


def enough_problems(recipe: Recipe) -> Iterator[Fault | Warning_]:
    """Demonstrations and placebos are taken from other training problems; a step prefers different ones."""
    number = recipe.data.train.num_problems
    if number is None:
        return
    others = recipe.context.num_demonstrations + int(recipe.context.name == "placebo")
    if number <= others:
        yield Fault(
            f"`data.train.num_problems` is {number}",
            f"the context takes {others} from other training problems, beside the problem itself",
            f"set data.train.num_problems={others + 1} or more",
        )
    if number < recipe.train.num_problems_per_step:
        yield Warning_(
            f"train.num_problems_per_step={recipe.train.num_problems_per_step} and data.train.num_problems={number}",
            "the same problem comes more than once in a step",
            "Raise data.train.num_problems, or take several samples of each with rollout.num_samples",
        )


def heldout_is_held_out(recipe: Recipe) -> Iterator[Fault | Warning_]:
    """A model evaluated on what it was trained on shows nothing."""
    if recipe.eval is None:
        return
    train, heldout = recipe.data.train, recipe.eval.data
    leak = _leak(train, heldout)
    if leak is not None:
        yield Fault("`eval.data` holds the training problems", *leak)
    if (
        isinstance(train, HubSource)
        and isinstance(heldout, HubSource)
        and train.dataset == heldout.dataset
        and leak is None
    ):
        slices = train.split.split("[")[0] == heldout.split.split("[")[0] and train.subset == heldout.subset
        if slices and train.split != heldout.split:
            yield Warning_(
                f"data.train.split={train.split} and eval.data.split={heldout.split} are cut from the same split",
                "they are disjoint only if their ranges are",
                "Compare the two ranges",
            )


def _leak(train: Source, heldout: Source) -> tuple[str, str] | None:
    """Why the two overlap and how to part them, or None."""
    if isinstance(train, TaskSource) and isinstance(heldout, TaskSource) and train.task == heldout.task:
        if train.split == heldout.split:
            why = f"both are the {train.split} split of task {train.task}; seeds and options do not part a split"
            return why, "set data.train.split=train and eval.data.split=heldout"
        if train.options.get(HELDOUT_FRAC) != heldout.options.get(HELDOUT_FRAC):
            why = f"the splits of task {train.task} are disjoint only under the same {HELDOUT_FRAC}"
            return why, f"give data.train.options and eval.data.options the same {HELDOUT_FRAC}"
    if (
        isinstance(train, FileSource)
        and isinstance(heldout, FileSource)
        and train.path.resolve() == heldout.path.resolve()
    ):
        return f"both read {train.path}", "split the file in two, and set eval.data.path to the second"
    if isinstance(train, HubSource) and isinstance(heldout, HubSource):
        parts = [(one.dataset, one.subset, one.split) for one in (train, heldout)]
        if parts[0] == parts[1]:
            return f"both read split {train.split} of {train.dataset}", "set eval.data.split=test, or another split"
    return None


RULES: tuple[Rule, ...] = (enough_problems, heldout_is_held_out)
