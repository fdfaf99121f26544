"""On-policy self-distillation in one file: the whole method, with torch and transformers alone.

    python examples/opd_in_one_file.py MODEL_FOLDER --steps 40

The student answers questions in its own words. A teacher (here the same model with its adapter off, shown three solved
examples and the solution) then says, at every token the student wrote, which next token it would have liked. The
student moves toward the teacher. Nothing is imitated that the student did not write itself: that is "on-policy".

Read it top to bottom. Left out, and to be found in the library: other divergences and clips, a head that never builds
[N, V] logits, accumulation over micro-batches, bfloat16 compute, a seed for each sample, heads with soft-capping or
with more rows than the tokenizer has tokens, intervals and placebo teachers, checkpoints, peft's file format.

Shapes: B sequences, T tokens, N completion tokens of the batch, V vocabulary, D hidden.
"""

from __future__ import annotations

import argparse
import inspect
import math
import random
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

Question = tuple[int, int]
Messages = list[dict[str, str]]

# ---- the task: 7 + 22. Each pair is asked in one order only, so that no training question gives a held-out one away --


def make_split(num_heldout: int = 32) -> tuple[list[Question], list[Question]]:
    """(training, held-out) questions: one digit plus two digits, 640 in all."""
    questions = [(a, b) for a in range(2, 10) for b in range(11, 91)]
    random.Random(0).shuffle(questions)
    return questions[num_heldout:], questions[:num_heldout]


def is_right(text: str, a: int, b: int) -> tuple[bool, bool]:
    """Two metrics, since they mean different things: right in the box (format and sum), or anywhere (the sum)."""
    boxes = re.findall(r"\\boxed\{\s*(\d+)\s*\}", text)
    return boxes[-1:] == [str(a + b)], str(a + b) in re.findall(r"\d+", text)


# ---- two prompts for one question: the student sees it alone, the teacher also sees how it is solved -----------------


def student_messages(a: int, b: int) -> Messages:
    system = {"role": "system", "content": "You are a helpful assistant."}
    return [system, {"role": "user", "content": f"What is {a} + {b}? Put the final answer in \\boxed{{}}."}]


def teacher_messages(a: int, b: int, examples: Sequence[Question]) -> Messages:
    # Every example carries its own solution in the question and repeats it in the reply: that shows the model what the
    # solution is for. Shown the bare solution, a model this small answers in prose, and a teacher that is poor when
    # *sampled* has nothing worth moving toward.
    messages = student_messages(a, b)[:1]
    for x, y in (*examples, (a, b)):
        solution = f"{x} + {y} = {x + y}. The answer is \\boxed{{{x + y}}}."
        question = student_messages(x, y)[1]["content"]
        messages.append({"role": "user", "content": f"Solution: {solution}\n{question}"})
        messages.append({"role": "assistant", "content": solution})
    return messages[:-1]  # the last reply is what the student's completion takes the place of


# ---- LoRA: y = W x + (alpha / rank) B A x, with W frozen. B starts at zero: the student starts as the teacher's model


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base, self.scale, self.on = base, alpha / rank, True
        self.A = nn.Parameter(torch.empty(rank, base.in_features, device=base.weight.device))
        self.B = nn.Parameter(torch.zeros(base.out_features, rank, device=base.weight.device))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return y + F.linear(F.linear(x, self.A), self.B) * self.scale if self.on else y


def add_lora(model: nn.Module, rank: int = 16, alpha: float = 32.0) -> list[nn.Parameter]:
    """Freeze the model, wrap every linear layer of its decoder (not the head), and return what is left to train."""
    model.requires_grad_(False)
    for module in list(model.get_decoder().modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, LoRA(child, rank, alpha))
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """The weights of before training, without a copy of them: this is the fixed teacher."""
    adapters = [module for module in model.modules() if isinstance(module, LoRA)]
    for adapter in adapters:
        adapter.on = False
    yield
    for adapter in adapters:
        adapter.on = True


# ---- sampling: ids in, ids out. What is scored later are these very ids, never a text that is tokenized again --------


@torch.no_grad()
def sample(model: nn.Module, prompts: list[list[int]], stop_ids: set[int], max_new_tokens: int) -> list[list[int]]:
    """One completion at temperature 1 for each prompt; it ends with the stop id, unless it was cut at the limit."""
    # Left padding puts every prompt's last token in the last column. Positions are given explicitly, counted from the
    # first real token, so that a prompt sees the same positions as when it is alone. Padding is masked; its id is any.
    width = max(map(len, prompts))
    ids_BT = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=model.device)
    mask_BT = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    decoder, cache = model.get_decoder(), DynamicCache(config=model.config)
    # transformers renamed this argument. The old name raises nothing: it would sample without a memory.
    cache_name = "cache" if "cache" in inspect.signature(decoder.forward).parameters else "past_key_values"
    completions: list[list[int]] = [[] for _ in prompts]
    for _ in range(max_new_tokens):
        positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)[:, -ids_BT.shape[1] :]
        out = decoder(ids_BT, attention_mask=mask_BT, position_ids=positions_BT, use_cache=True, **{cache_name: cache})
        probability_BV = model.lm_head(out.last_hidden_state[:, -1]).float().softmax(-1)
        ids_BT = torch.multinomial(probability_BV, 1)
        mask_BT = F.pad(mask_BT, (0, 1), value=1)
        for completion, token in zip(completions, ids_BT[:, 0].tolist(), strict=True):
            if not completion or completion[-1] not in stop_ids:
                completion.append(token)
        if all(completion[-1] in stop_ids for completion in completions):
            break
    return completions


# ---- scoring and the loss: one distribution and one divergence for every token that the student wrote ----------------


def completion_logits(model: nn.Module, prompts: list[list[int]], completions: list[list[int]]) -> Tensor:
    """[N, V] float32, sequence by sequence: the logits that predict each completion token after its prompt."""
    # Here padding is on the right and needs no mask: attention is causal, so nothing before the padding can see it.
    # The last prompt token predicts the first completion token; after the last completion token nothing is predicted.
    pairs = list(zip(prompts, completions, strict=True))
    width = max(len(p) + len(c) - 1 for p, c in pairs)
    ids_BT = torch.tensor([p + c[:-1] + [0] * (width - len(p) - len(c) + 1) for p, c in pairs], device=model.device)
    hidden_BTD = model.get_decoder()(ids_BT, use_cache=False).last_hidden_state
    # Select before the head: logits at prompt positions would cost most of the memory, to be thrown away.
    hidden_ND = torch.cat([hidden_BTD[i, len(p) - 1 : len(p) - 1 + len(c)] for i, (p, c) in enumerate(pairs)])
    return model.lm_head(hidden_ND).float()


def token_kl(student_NV: Tensor, teacher_NV: Tensor, direction: str = "forward") -> Tensor:
    """[N] nats: forward is KL(teacher‖student), spread over all the teacher may do; reverse KL(student‖teacher)."""
    student_NV, teacher_NV = student_NV.log_softmax(-1), teacher_NV.log_softmax(-1)
    p_NV, q_NV = (teacher_NV, student_NV) if direction == "forward" else (student_NV, teacher_NV)
    return (p_NV.exp() * (p_NV - q_NV)).sum(-1)


# ---- the loop --------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="On-policy self-distillation on sums, in one file.")
    parser.add_argument("model", help="folder (or hub id) of a chat model")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--kl", choices=["forward", "reverse"], default="forward")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    rng, device = random.Random(0), "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device).eval()
    parameters = add_lora(model)
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, weight_decay=0.0)
    # A chat model may name one stop id in its tokenizer and others in its generation config: all of them end a turn.
    more = model.generation_config.eos_token_id
    stop_ids = {tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])} - {None}
    train, heldout = make_split()
    print(f"{device}: {sum(p.numel() for p in parameters):,} weights to train, {len(train)} + {len(heldout)} questions")

    def encode(messages: Messages) -> list[int]:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    examples, train = train[:3], train[3:]  # solved for the teacher, and used nowhere else

    def teacher_prompt(a: int, b: int) -> list[int]:
        return encode(teacher_messages(a, b, examples))

    def evaluate(who: str, prompts: list[list[int]]) -> None:
        texts = tokenizer.batch_decode(sample(model, prompts, stop_ids, 24))
        right = [is_right(text, a, b) for text, (a, b) in zip(texts, heldout, strict=True)]
        boxed, anywhere = (sum(column) / len(right) for column in zip(*right, strict=True))
        print(f"held-out, {who}: in the box {boxed:.0%}, anywhere {anywhere:.0%}. The first: {texts[0]!r}")

    evaluate("student before", [encode(student_messages(a, b)) for a, b in heldout])
    evaluate("teacher", [teacher_prompt(a, b) for a, b in heldout])  # B is still zero: the untrained model
    for step in range(1, args.steps + 1):
        began = time.time()
        questions = rng.sample(train, 12)
        prompts = [encode(student_messages(a, b)) for a, b in questions]
        completions = sample(model, prompts, stop_ids, 24)  # on-policy: with the weights of now
        with torch.no_grad(), adapter_off(model):  # the same completions, after the teacher's prompts
            teacher_NV = completion_logits(model, [teacher_prompt(a, b) for a, b in questions], completions)
        student_NV = completion_logits(model, prompts, completions)
        # The one division: by all supervised tokens of the batch. A mean of means would weigh short answers more.
        loss = token_kl(student_NV, teacher_NV, args.kl).sum() / len(student_NV)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.param_groups[0]["lr"] = args.lr * min(1.0, step / 4)  # four steps of warm-up
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: {loss.item():.3f} nats a token, {len(student_NV)} tokens, {time.time() - began:.1f} s")
    evaluate("student after", [encode(student_messages(a, b)) for a, b in heldout])


if __name__ == "__main__":
    main()
