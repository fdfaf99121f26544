"""From a model reference to a model and tokenizer on a device, with the facts that the rest of the package needs."""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.config.schema import ModelConfig
from opd.errors import OpdError
from opd.models import cache
from opd.models.facts import find_stop_ids, load_tokenizer, num_real_tokens, resolve, unreachable

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WEIGHT_FILES = ("*.safetensors", "*.bin")
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, its tokenizer, and what samplers and losses must know of both.

    Args:
        model: the model; a `PeftModel` once an adapter is on it.
        tokenizer: as its makers saved it.
        stop_ids: every token id that ends a completion.
        vocab_size: number of real tokens; rows of the head at or past it are never sampled or compared.
        pad_id: a valid token id to fill rows with. Often the EOS id: masks come from lengths, never from this id.
        reference: as the recipe names it.
        fingerprint: changes when the config or the weight files change; cheap, not cryptographic.
        device: where the model is.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    stop_ids: frozenset[int]
    vocab_size: int
    pad_id: int
    reference: str
    fingerprint: str
    device: torch.device


def pick_device() -> torch.device:
    """The best device of this machine: cuda, else mps, else cpu with a notice."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda")
    if torch.backends.mps.is_available():
        return torch.device("mps")
    cache.notice("NO GPU FOUND: running on the CPU. Right for small models only.")
    return torch.device("cpu")


def known_device(name: str) -> torch.device:
    """The device of that name.

    Raises:
        OpdError: there is no such device on this machine.
    """
    import torch

    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise OpdError(
            f"there is no device {name!r}", why=str(error).splitlines()[0], fix="give cpu or cuda"
        ) from error
    return device


def load(config: ModelConfig, *, device: str | torch.device) -> LoadedModel:
    """Load the model that `config` names, in its dtype and attention, onto `device`, in evaluation mode.

    Raises:
        OpdError: the reference is wrong or out of reach, weights are missing or of another shape, the attention
            implementation is not available, or the device is not.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    if not sys.stderr.isatty():  # in a log file a bar is noise
        transformers_logging.disable_progress_bar()
    _check_attention(config)
    tokenizer = load_tokenizer(config)
    folder = resolve(config)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            revision=config.revision,
            dtype=getattr(torch, config.dtype),
            attn_implementation=config.attention,
            trust_remote_code=config.trust_remote_code,
            # Left alone, transformers raises without a name; _check_weights names them.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
        model, info = loaded
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise unreachable("the model", config, error) from error
    _check_weights(config, info)
    try:
        model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise OpdError(
            f"cannot put {config.model} on {device}", why=str(error).splitlines()[0], fix="use another device"
        ) from error
    return wrap(model, tokenizer, reference=config.model, fingerprint=_fingerprint(folder, model))


def wrap(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, reference: str, fingerprint: str
) -> LoadedModel:
    """A `LoadedModel` from a model and tokenizer that are already in memory; switches the model to evaluation mode.

    Raises:
        OpdError: the model names no token that ends a completion.
    """
    from transformers import GenerationConfig

    generation: Any = model.generation_config or GenerationConfig.from_model_config(model.config)
    stop_ids = find_stop_ids(tokenizer, generation)
    if not stop_ids:
        raise OpdError(
            f"{reference} names no token that ends a completion",
            why="tokenizer, generation_config and chat template have no end-of-sequence token",
            fix="set eos_token_id in the model's generation_config.json",
        )
    pad: Any = tokenizer.pad_token_id
    vocab_size = num_real_tokens(tokenizer, _num_head_rows(model))
    return LoadedModel(
        model=model.eval(),
        tokenizer=tokenizer,
        stop_ids=stop_ids,
        vocab_size=vocab_size,
        # A padding token that was added without a row in the embedding would fail on its first use.
        pad_id=int(pad) if pad is not None and pad < vocab_size else min(stop_ids),
        reference=reference,
        fingerprint=fingerprint,
        device=model.device,
    )


def _num_head_rows(model: PreTrainedModel) -> int:
    head: Any = model.get_output_embeddings()
    return int(head.weight.shape[0])


def _check_attention(config: ModelConfig) -> None:
    from transformers.utils import is_flash_attn_2_available

    if config.attention == "flash_attention_2" and not is_flash_attn_2_available():
        raise OpdError(
            f"cannot load {config.model} with attention flash_attention_2",
            why="the flash-attn package is not installed, or this machine has no GPU that it supports",
            fix="set attention: sdpa, or pip install flash-attn on a machine with an NVIDIA GPU",
        )


def _check_weights(config: ModelConfig, info: dict[str, Any]) -> None:
    """transformers fills missing weights with random numbers and goes on; here that is an error."""
    missing, mismatched = sorted(info["missing_keys"]), sorted(str(key) for key in info["mismatched_keys"])
    if missing or mismatched:
        raise OpdError(
            f"the weights of {config.model} are not whole",
            why=f"{len(missing)} missing {missing[:3]}, {len(mismatched)} of another shape {mismatched[:3]}",
            fix="save the model again with save_pretrained, or fetch it again",
        )
    if unexpected := sorted(info["unexpected_keys"]):
        cache.notice(
            f"{config.model} holds {len(unexpected)} weights that its architecture has no use for, "
            f"e.g. {unexpected[0]}: not loaded"
        )


def _fingerprint(folder: str, model: PreTrainedModel) -> str:
    """Hash of the config and of each weight file's name, size and three samples of its bytes."""
    path = Path(folder)
    digest = hashlib.sha256()
    if not path.is_dir():
        # On the hub the commit stands for every file.
        digest.update(json.dumps([folder, getattr(model.config, "_commit_hash", None)]).encode())
        return digest.hexdigest()[:16]
    digest.update((path / "config.json").read_bytes())
    for file in sorted(file for pattern in WEIGHT_FILES for file in path.glob(pattern)):
        digest.update(f"{file.name}:{file.stat().st_size}".encode())
        digest.update(_sample_bytes(file))
    return digest.hexdigest()[:16]


def _sample_bytes(file: Path, num_bytes: int = 1 << 16) -> bytes:
    """The start, the middle and the end: a safetensors file's start says nothing of the values."""
    size = file.stat().st_size
    sample = b""
    with file.open("rb") as handle:
        for start in (0, size // 2, max(size - num_bytes, 0)):
            handle.seek(start)
            sample += handle.read(num_bytes)
    return sample


def load_adapter(loaded: LoadedModel, folder: str | Path) -> LoadedModel:
    """Put the adapter in `folder` on the model: every tensor of it, or an error, never the base model alone.

    The base model's modules are wrapped in place (peft), so `loaded` itself must not be used afterwards. Says aloud
    when the adapter names another base model, and when it changes nothing.

    Raises:
        OpdError: the adapter is missing, empty, in pickle format, or made for another model.
    """
    from peft import PeftModel, get_peft_model_state_dict

    path = Path(folder)
    shapes = _adapter_shapes(path)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Found missing adapter keys")  # an error below
            adapted = PeftModel.from_pretrained(loaded.model, str(path), is_trainable=False)
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        why = " ".join(str(error).split())[:400]
        raise _bad_adapter(path, f"it does not fit {loaded.reference}: {why}", _OTHER_BASE) from error
    # "auto", the default, asks the hub about the base model; nothing here ever resizes an embedding.
    weights = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    expected = {key: tuple(value.shape) for key, value in weights.items()}
    if expected != shapes:
        differing = sorted({key for key, _ in expected.items() ^ shapes.items()})
        why = f"{len(differing)} of its tensors do not fit {loaded.reference}, e.g. {differing[0]}"
        raise _bad_adapter(path, why, _OTHER_BASE)
    trained_on = json.loads((path / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if trained_on and trained_on != loaded.model.name_or_path:
        cache.notice(f"the adapter {path} was trained on {trained_on}, and is put on {loaded.model.name_or_path}")
    up = [value for key, value in weights.items() if "lora_B" in key]
    if up and not any(bool(value.any()) for value in up):
        cache.notice(f"the adapter {path} changes nothing: all its B matrices are zero, as before the first step")
    digest = hashlib.sha256(loaded.fingerprint.encode())
    digest.update((path / ADAPTER_CONFIG).read_bytes() + _sample_bytes(path / ADAPTER_WEIGHTS))
    adapted_model: Any = adapted.eval()
    return replace(loaded, model=adapted_model, fingerprint=digest.hexdigest()[:16])


def _adapter_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in the adapter's file."""
    from safetensors import SafetensorError, safe_open

    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (path / name).is_file():
            raise _bad_adapter(path, f"there is no {name} in it", "give the folder that peft's save_pretrained wrote")
    try:
        with safe_open(path / ADAPTER_WEIGHTS, "pt") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise _bad_adapter(path, f"{ADAPTER_WEIGHTS} is broken: {error}", "save the adapter again") from error
    if not any(0 not in shape for shape in shapes.values()):
        raise _bad_adapter(path, f"{ADAPTER_WEIGHTS} holds no weights", "save the adapter again, gathered on one rank")
    return shapes


_OTHER_BASE = "load it onto the model that it was trained on"


def _bad_adapter(path: Path, why: str, fix: str) -> OpdError:
    return OpdError(f"cannot load the adapter {path}", why=why, fix=fix)
