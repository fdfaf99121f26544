"""Files that are whole or absent, and their digests."""

from __future__ import annotations

import hashlib
from pathlib import Path


def write_aside(path: Path, text: str) -> Path:
    """Write UTF-8 text beside `path`, then rename it: a reader never sees half of it. Returns `path`."""
    aside = path.with_name(f".{path.name}.writing")
    aside.write_text(text, encoding="utf-8")
    return aside.replace(path)


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file's bytes, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
