"""Hidden states -> loss -> gradient: `Loss.linear` against TRL's ChunkedDivergenceFunction, dense autograd, the floor.

    python benchmarks/loss_kernel.py                       # the table of docs/performance.md
    python benchmarks/loss_kernel.py --vocab 49152 --dim 576 --rows 512 --divergences jsd --heads frozen

The same tensors go to all; values and gradients are compared before anything is timed. Times are medians of repetitions
taken in turn; the floor is the time of the matrix products alone (three; four when the head trains). Memory is measured
in a process of its own for each: the peak above the inputs and above the gradients that are returned. `dense` makes
both models' logits in full and lets autograd do the rest; it is measured for memory alone.

N supervised tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from opd.loss import Full, Head, build

BETA = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.5}
MARKS = ("<!-- loss kernel: begin -->", "<!-- loss kernel: end -->")


@dataclass(frozen=True)
class Cell:
    """One row of the table."""

    num_rows: int
    vocab: int
    dim: int
    divergence: str
    dtype: str
    head: str


def cells_of_docs() -> list[Cell]:
    """A head of the size of SmolLM2's, of Qwen3-0.6B's, and of a model with a vocabulary of 262k."""
    small = [Cell(1024, 49152, 576, name, "float32", "frozen") for name in BETA]
    small += [Cell(1024, 49152, 576, "forward_kl", "bfloat16", "frozen")]
    small += [Cell(1024, 49152, 576, "forward_kl", dtype, "trained") for dtype in ("float32", "bfloat16")]
    middle = [Cell(1024, 151936, 1024, name, "float32", "frozen") for name in BETA]
    middle += [Cell(1024, 151936, 1024, "forward_kl", "bfloat16", "frozen")]
    middle += [Cell(1024, 151936, 1024, "forward_kl", "float32", "trained")]
    large = [Cell(128, 262144, 2048, "forward_kl", "float32", "frozen")]
    return [*small, *middle, *large]


class Work:
    """The inputs of a cell, and what each contender does with them."""

    def __init__(self, cell: Cell, device: torch.device) -> None:
        self.cell, self.device = cell, device
        generator = torch.Generator().manual_seed(0)
        dtype = getattr(torch, cell.dtype)

        def draw(rows: int, scale: float) -> Tensor:
            return (torch.randn(rows, cell.dim, generator=generator) * scale).to(device, dtype)

        # Logits with a standard deviation of about 2, so that distributions are neither flat nor certain.
        scale = 2 / cell.dim**0.5
        self.student_weight, self.teacher_weight = draw(cell.vocab, scale), draw(cell.vocab, scale)
        self.student, self.teacher = draw(cell.num_rows, 1.0), draw(cell.num_rows, 1.0)
        self.student.requires_grad_()
        self.student_weight.requires_grad_(cell.head == "trained")

    def run(self, values: Callable[[], Tensor]) -> tuple[Tensor, float]:
        """One forward and backward pass; the values and how long it took, in seconds."""
        self.student.grad = self.student_weight.grad = None
        self._wait()
        began = time.perf_counter()
        found = values()
        found.mean().backward()
        self._wait()
        return found.detach(), time.perf_counter() - began

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def opd(self) -> Tensor:
        loss = build({"name": self.cell.divergence})
        teacher = Full(self.teacher, Head(self.teacher_weight))
        return loss.linear(self.student, Head(self.student_weight), teacher).values

    def trl(self) -> Tensor:
        from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

        weights = (self.student_weight, None, self.teacher, self.teacher_weight, None)
        return ChunkedDivergenceFunction.apply(self.student, *weights, BETA[self.cell.divergence])[0]

    def dense(self) -> Tensor:
        log_q = F.log_softmax((self.student @ self.student_weight.T).float(), -1)
        with torch.no_grad():
            log_p = F.log_softmax((self.teacher @ self.teacher_weight.T).float(), -1)
        if self.cell.divergence == "forward_kl":
            return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
        if self.cell.divergence == "reverse_kl":
            return F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)
        log_m = torch.logsumexp(torch.stack([log_q, log_p]), 0) - torch.log(torch.tensor(2.0, device=log_q.device))
        both = [F.kl_div(log_m, side, reduction="none", log_target=True).sum(-1) for side in (log_p, log_q)]
        return (both[0] + both[1]) / 2

    @torch.no_grad()
    def floor(self) -> float:
        """Seconds of the products alone, over as many rows at a time as fit into 1 GB."""
        rows = max(1, min(self.cell.num_rows, 2**30 // (self.cell.vocab * self.student.element_size())))
        logits = torch.empty(rows, self.cell.vocab, dtype=self.student.dtype, device=self.device)
        back = torch.empty_like(self.student)
        d_weight = torch.empty_like(self.student_weight) if self.cell.head == "trained" else None
        self._wait()
        began = time.perf_counter()
        for start in range(0, self.cell.num_rows, rows):
            part = slice(start, start + rows)
            out = logits[: self.student[part].shape[0]]
            torch.mm(self.teacher[part], self.teacher_weight.T, out=out)
            torch.mm(self.student[part], self.student_weight.T, out=out)
            torch.mm(out, self.student_weight, out=back[part])
            if d_weight is not None:
                torch.mm(out.T, self.student[part], out=d_weight)
        self._wait()
        return time.perf_counter() - began

    def gradients(self) -> list[Tensor]:
        return [x.grad.float() for x in (self.student, self.student_weight) if x.grad is not None]


def agree(work: Work) -> float:
    """The largest relative difference between ours and TRL's, in values and in gradients."""
    found: list[list[Tensor]] = []
    for values in (work.opd, work.trl):
        value, _ = work.run(values)
        found.append([value.float(), *work.gradients()])
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(*found, strict=True))


def times(work: Work, repetitions: int) -> dict[str, float]:
    """Median seconds of each, taken in turn."""
    work.floor()
    taken: dict[str, list[float]] = {"opd": [], "trl": [], "floor": []}
    for _ in range(repetitions):
        taken["opd"].append(work.run(work.opd)[1])
        taken["trl"].append(work.run(work.trl)[1])
        taken["floor"].append(work.floor())
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def peak_bytes(cell: Cell, name: str, device: torch.device) -> int:
    """Peak memory of one pass above its inputs and the gradients it returns. Run in a fresh process."""
    small = Work(Cell(8, 1024, cell.dim, cell.divergence, cell.dtype, cell.head), device)
    small.run(getattr(small, name))  # what a library allocates once
    work = Work(cell, device)
    returned = sum(x.numel() * x.element_size() for x in (work.student, work.student_weight) if x.requires_grad)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work.run(getattr(work, name))
        return torch.cuda.max_memory_allocated() - before - returned
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = _status_bytes("VmRSS")
    work.run(getattr(work, name))
    return _status_bytes("VmHWM") - before - returned


def _status_bytes(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def measure(cell: Cell, args: argparse.Namespace) -> dict[str, object]:
    """One row of the table."""
    work = Work(cell, torch.device(args.device))
    row: dict[str, object] = {**asdict(cell), "difference": agree(work), **times(work, args.repetitions)}
    del work
    gc.collect()
    for name in ("opd", "trl", "dense"):
        command = [sys.executable, __file__, "--threads", str(args.threads), "--device", args.device]
        command += ["--peak", name, json.dumps(asdict(cell))]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        row[f"{name}_bytes"] = int(printed.split()[-1])
    return row


COLUMNS = ("N", "V", "D", "loss", "dtype", "head", "TRL / opd", "opd / floor", "opd MB", "TRL MB", "dense MB")


def cells(row: dict[str, object]) -> list[str]:
    """A row as text."""
    number: dict[str, float] = {key: value for key, value in row.items() if isinstance(value, int | float)}
    names = [str(row[key]) for key in ("num_rows", "vocab", "dim", "divergence", "dtype", "head")]
    ratios = [f"{number['trl'] / number['opd']:.2f}x", f"{number['opd'] / number['floor']:.2f}x"]
    return [*names, *ratios, *(f"{number[f'{name}_bytes'] / 1e6:,.0f}" for name in ("opd", "trl", "dense"))]


def write_page(page: Path, rows: list[dict[str, object]]) -> None:
    """Put the table between the page's marks."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(cells(row))} |" for row in rows]
    before, rest = page.read_text().split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    page.write_text("\n".join([f"{before}{MARKS[0]}", *lines, f"{MARKS[1]}{after}"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--vocab", type=int, nargs="+", help="measure these instead of the table of the docs")
    parser.add_argument("--dim", type=int, nargs="+", default=[1024])
    parser.add_argument("--divergences", nargs="+", choices=list(BETA), default=list(BETA))
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--heads", nargs="+", choices=["frozen", "trained"], default=["frozen", "trained"])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/loss_kernel.json"))
    parser.add_argument("--page", type=Path, help="also write the table into this page")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.peak:
        print(peak_bytes(Cell(**json.loads(args.peak[1])), args.peak[0], torch.device(args.device)))
        return
    chosen = cells_of_docs()
    if args.vocab:
        grid = itertools.product(args.vocab, args.dim, args.divergences, args.dtypes, args.heads)
        chosen = [Cell(args.rows, *point) for point in grid]
    table = Table(title=f"{args.threads} threads, {args.device}, median of {args.repetitions}", show_lines=False)
    for name in COLUMNS:
        table.add_column(name, justify="right")
    rows: list[dict[str, object]] = []
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for cell in chosen:
        rows.append(measure(cell, args))
        table.add_row(*cells(rows[-1]))
        print(" ".join(cells(rows[-1])), flush=True)
        args.out.write_text(json.dumps(rows, indent=2) + "\n")
    Console(width=140).print(table)
    if args.page:
        write_page(args.page, rows)


if __name__ == "__main__":
    main()
