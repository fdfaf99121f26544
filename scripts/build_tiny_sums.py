"""Train the tiny model that can do something: sums of two numbers below 100, one character a token.

    OMP_NUM_THREADS=1 PYTHONPATH=tests python scripts/build_tiny_sums.py

A fixed number of steps on one thread (about three minutes), then the weights (fp16), tokenizer and a README with the
held-out accuracy are written to tests/fixtures/tiny_sums. Tests load them from there and never train.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

import tiny

FOLDER = Path(__file__).parents[1] / "tests" / "fixtures" / "tiny_sums"
NUM_STEPS = 1000
BATCH_SIZE = 256
LEARNING_RATE = 3e-3
NUM_WARMUP_STEPS = 50


def build_model(eos_id: int) -> PreTrainedModel:
    """A Llama of 0.6M parameters; 320 rows for 257 tokens, so that padded rows exist here too."""
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=336,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos_id,
        pad_token_id=eos_id,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=eos_id, pad_token_id=eos_id)
    return model


def encode(tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [B, T] and labels [B, T]: the answer and its <eos> count, the question and padding do not (-100)."""
    rows, labels = [], []
    for a, b in pairs:
        prompt = tokenizer.encode(tiny.question(a, b) + "=")
        completion = [*tokenizer.encode(tiny.answer(a, b)), tokenizer.eos_token_id]
        rows.append(torch.tensor(prompt + completion))
        labels.append(torch.tensor([-100] * len(prompt) + completion))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, batch_first=True, padding_value=tokenizer.eos_token_id), pad(
        labels, batch_first=True, padding_value=-100
    )


def train(model: PreTrainedModel, ids_BT: torch.Tensor, labels_BT: torch.Tensor) -> None:
    """AdamW with linear warm-up and cosine decay; padding is on the right, so causal attention never sees it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.1)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.02, 1.0, NUM_WARMUP_STEPS)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS - NUM_WARMUP_STEPS)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], [NUM_WARMUP_STEPS])
    model.train()
    for step in range(NUM_STEPS):
        rows = torch.randint(len(ids_BT), (BATCH_SIZE,))
        loss = model(ids_BT[rows], labels=labels_BT[rows]).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
    model.eval()


@torch.no_grad()
def accuracy(model: PreTrainedModel, ids_BT: torch.Tensor, labels_BT: torch.Tensor) -> float:
    """Fraction of sums whose every answer token and <eos> is the most likely one, which is exact greedy decoding."""
    predicted_BT = model(ids_BT).logits[:, :-1].argmax(-1)
    targets_BT = labels_BT[:, 1:]
    return ((predicted_BT == targets_BT) | (targets_BT == -100)).all(-1).double().mean().item()


def main() -> None:
    """Train, save, load what was saved, measure that."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = tiny.build_sums_tokenizer()
    model = build_model(tokenizer.eos_token_id)
    started = time.process_time()
    train(model, *encode(tokenizer, tiny.sum_pairs("train")))
    print(f"{time.process_time() - started:.0f} seconds of one core")
    model.to(torch.float16).save_pretrained(FOLDER)
    tokenizer.save_pretrained(FOLDER)
    saved = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    heldout = tiny.sum_pairs("heldout")
    score = accuracy(saved, *encode(tokenizer, heldout))
    num_parameters = sum(parameter.numel() for parameter in saved.parameters())
    text = f"""# tiny_sums

A Llama of {num_parameters / 1e6:.2f}M parameters that adds two numbers below 100, one byte a token, the digits of the
sum reversed: it continues `12+35=` with `74<eos>`. Made by `scripts/build_tiny_sums.py`: {NUM_STEPS} steps of
{BATCH_SIZE} sums. Greedy accuracy of these fp16 weights, loaded as fp32, on the {len(heldout)} sums that it was not
trained on: {score:.1%}.
"""
    (FOLDER / "README.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
