"""The only file that knows ranks: one process or many through accelerate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedType
from torch import Tensor, nn

from opd.config.schema import LogConfig
from opd.errors import OpdError

T = TypeVar("T")


class Ranks:
    """Devices, gradient exchange, sums over ranks and trackers.

    Mixed precision and gradient accumulation stay with the learner (`mixed_precision="no"` here), since accelerate
    would divide each micro-batch by their number, and micro-batches hold different numbers of supervised tokens.
    """

    def __init__(self, log: LogConfig, folder: Path, *, device: str | None = None) -> None:
        _refuse_missing(log.trackers)
        self.accelerator = Accelerator(
            mixed_precision="no", log_with=list(log.trackers) or None, project_dir=str(folder), cpu=device == "cpu"
        )
        if self.accelerator.distributed_type not in (
            DistributedType.NO,
            DistributedType.MULTI_CPU,
            DistributedType.MULTI_GPU,
        ):
            raise OpdError(
                f"Training under {self.accelerator.distributed_type.value} is not supported.",
                why="The loop runs in one process or under DDP.",
                fix="Choose multi-GPU or multi-CPU (DDP) in `accelerate config`.",
            )
        if device is not None and device not in (self.device.type, str(self.device)):
            raise OpdError(
                f"Training cannot run on {device!r}.",
                why=f"accelerate gives this process {self.device}.",
                fix="Leave the device out, or give cpu. CUDA_VISIBLE_DEVICES chooses among several GPUs.",
            )
        self._trackers = log.trackers

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.accelerator.device

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and talks."""
        return self.accelerator.is_main_process

    @property
    def num_ranks(self) -> int:
        """How many processes train together."""
        return self.accelerator.num_processes

    @property
    def index(self) -> int:
        """Which of the processes this one is, from 0."""
        return self.accelerator.process_index

    def mine(self, items: Sequence[T]) -> list[T]:
        """This rank's share of a step's samples."""
        return list(items[self.index :: self.num_ranks])

    def prepare(self, module: nn.Module) -> nn.Module:
        """The module as it must be called so that gradients are exchanged; itself on a single process."""
        return module if self.num_ranks == 1 else self.accelerator.prepare_model(module)

    def accumulate(self, module: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
        """Gradients are exchanged once, in the last micro-batch."""
        return nullcontext() if last or self.num_ranks == 1 else self.accelerator.no_sync(module)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks, in float64."""
        if self.num_ranks == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        total = self.accelerator.reduce(tensor, reduction="sum")
        assert isinstance(total, Tensor)
        return total.tolist()

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of every rank, rank by rank; a rank with fewer than the others adds rows of zeros."""
        if self.num_ranks == 1:
            return rows
        everyone = self.accelerator.gather(self.accelerator.pad_across_processes(rows))
        assert isinstance(everyone, Tensor)
        return everyone

    def wait(self) -> None:
        """All ranks meet here."""
        self.accelerator.wait_for_everyone()

    def start_trackers(self, project: str, config: dict[str, Any]) -> None:
        """Open the trackers that the recipe names."""
        if self._trackers:
            self.accelerator.init_trackers(project, config=dict(_flat(config)))

    def track(self, values: dict[str, float], step: int) -> None:
        """Send one step's values to the trackers."""
        if self._trackers:
            self.accelerator.log(values, step=step)

    def end(self) -> None:
        """Close the trackers."""
        if self._trackers:
            self.accelerator.end_training()


def _refuse_missing(trackers: Sequence[str]) -> None:
    """accelerate leaves out a tracker that is not installed, and says nothing."""
    available = {str(tracker) for tracker in get_available_trackers()}
    missing = [tracker for tracker in trackers if tracker not in available]
    if missing:
        raise OpdError(
            f"log.trackers names what is not installed: {', '.join(missing)}.",
            why="Nothing would be logged there.",
            fix=f"pip install {' '.join(missing)}, or set log.trackers=[]; steps.jsonl is always written.",
        )


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    """Dotted keys and plain values: tensorboard takes nothing else."""
    if isinstance(value, Mapping | list):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, item in items:
            yield from _flat(item, f"{key}.{name}" if key else str(name))
    else:
        yield key, value if isinstance(value, bool | int | float | str) else str(value)
