"""Tokens a second of the sampler against `model.generate` on the same prompts, side by side in one process.

    python benchmarks/rollout.py --batch-sizes 1 8 32

Both draw at temperature 1 with a fresh LoRA adapter in place, up to the same number of new tokens. Repetitions are
interleaved; the table shows medians and their ratio, which is what to quote: machines are shared and noisy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from opd.config.schema import SamplingConfig, StudentConfig
from opd.rollout.hf import HfSampler
from opd.training.student import Student, load_student


def prompts(student: Student, number: int) -> list[list[int]]:
    question = "What is {} + {}? Put the final answer in \\boxed{{}}."
    return [
        student.loaded.tokenizer.apply_chat_template(
            [{"role": "user", "content": question.format(2 + index % 8, 11 + index)}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for index in range(number)
    ]


def by_opd(sampler: HfSampler, batch: list[list[int]], num_tokens: int, repetition: int) -> float:
    began = time.perf_counter()
    seeds = [1000 * repetition + index for index in range(len(batch))]
    found = sampler.generate(batch, seeds, SamplingConfig(max_new_tokens=num_tokens))
    return sum(len(completion.ids) for completion in found) / (time.perf_counter() - began)


@torch.no_grad()
def by_generate(student: Student, batch: list[list[int]], num_tokens: int, repetition: int) -> float:
    torch.manual_seed(repetition)
    length, pad = max(map(len, batch)), student.loaded.pad_id
    ids = torch.tensor([[pad] * (length - len(prompt)) + prompt for prompt in batch])
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in batch])
    began = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=student.dtype == torch.bfloat16):
        out = student.model.generate(  # pyright: ignore
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=num_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=sorted(student.loaded.stop_ids),
            pad_token_id=pad,
        )
    seconds = time.perf_counter() - began
    stops = torch.tensor(sorted(student.loaded.stop_ids))
    ended = torch.isin(out[:, length:], stops).int().cumsum(1) - torch.isin(out[:, length:], stops).int()
    return (ended == 0).sum().item() / seconds  # up to and including the first stop token, as for ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="package:smollm2-135m-instruct")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--num-tokens", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/rollout.json"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    student = load_student(StudentConfig(model=args.model), device=torch.device("cpu"), seed=0)
    student.model.eval()
    loaded = student.loaded
    sampler = HfSampler(
        student.model,
        stop_ids=loaded.stop_ids,
        pad_id=loaded.pad_id,
        vocab_size=loaded.vocab_size,
        dtype=student.dtype,
        weights=student.merged,
    )
    table = Table(title=f"{args.num_tokens} new tokens, {args.threads} threads, median of {args.repetitions}")
    for name in ("batch", "opd, merged (tok/s)", "generate (tok/s)", "ratio"):
        table.add_column(name, justify="right")
    rows: list[dict[str, float]] = []
    for size in args.batch_sizes:
        batch = prompts(student, size)
        by_opd(sampler, batch, 2, 0)
        by_generate(student, batch, 2, 0)
        ours, theirs = [], []
        for repetition in range(1, args.repetitions + 1):
            ours.append(by_opd(sampler, batch, args.num_tokens, repetition))
            theirs.append(by_generate(student, batch, args.num_tokens, repetition))
        row = {"batch_size": size, "opd": statistics.median(ours), "generate": statistics.median(theirs)}
        row["ratio"] = row["opd"] / row["generate"]
        rows.append(row)
        table.add_row(str(size), f"{row['opd']:.1f}", f"{row['generate']:.1f}", f"{row['ratio']:.2f}x")
    Console().print(table)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
