"""Model references: the four ways a recipe names a model, told apart before anything is loaded."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from opd.errors import OpdError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class HubReference:
    """A model on the hub, e.g. ``Qwen/Qwen3-1.7B``."""

    id: str


@dataclass(frozen=True)
class FolderReference:
    """A local folder as `save_pretrained` writes it: config, safetensors, tokenizer."""

    path: Path


@dataclass(frozen=True)
class GgufReference:
    """One GGUF file, written ``gguf:PATH``; converted once into the cache folder."""

    path: Path


@dataclass(frozen=True)
class PackageReference:
    """A model that a Python package ships, written ``package:NAME``; fetched once into the cache folder."""

    name: str


Reference = HubReference | FolderReference | GgufReference | PackageReference


def parse(text: str) -> Reference:
    """Tell which kind of reference `text` is.

    An existing folder wins over a hub id of the same spelling.

    Raises:
        OpdError: the file or folder does not exist, or `text` is no reference at all.
    """
    kind, _, rest = text.partition(":")
    if kind == "package":
        return PackageReference(rest)
    if kind == "gguf":
        path = Path(rest).expanduser()
        if not path.is_file():
            raise OpdError(
                f"cannot load {text}", why=f"there is no file {path}", fix="give the path of a .gguf file after gguf:"
            )
        return GgufReference(path)
    folder = Path(text).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise OpdError(
                f"cannot load {text}",
                why=f"the folder {folder} holds no config.json",
                fix="give a folder that save_pretrained wrote (for an adapter, give its base model here)",
            )
        return FolderReference(folder)
    if HUB_ID.fullmatch(text):
        return HubReference(text)
    close = difflib.get_close_matches(kind, ("package", "gguf"), n=1)
    raise OpdError(
        f"cannot load {text}",
        why="there is no such folder, and it is not spelled like a hub id",
        fix=f"did you mean {close[0]}:{rest}?"
        if close and rest
        else "give a hub id (owner/name), a folder, gguf:PATH or package:NAME",
    )
