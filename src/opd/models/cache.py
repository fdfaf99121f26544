"""The cache folder: where fetched and converted models live, each written aside and then renamed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from opd.errors import OpdError

MARKER = "opd_source.json"


def root() -> Path:
    """The cache folder: ``OPD_CACHE``, else ``XDG_CACHE_HOME/opd``, else ``~/.cache/opd``."""
    if chosen := os.environ.get("OPD_CACHE"):
        return Path(chosen).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser() / "opd"
    return Path.home() / ".cache" / "opd"


def is_complete(folder: Path, source: Mapping[str, str]) -> bool:
    """Whether `folder` was made from `source` and every file of it is still there with its size."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        return marker["source"] == dict(source) and all(
            (folder / name).stat().st_size == num_bytes for name, num_bytes in marker["files"].items()
        )
    except (OSError, ValueError, KeyError, AttributeError):
        return False


def build(folder: Path, source: Mapping[str, str], write: Callable[[Path], None], *, num_bytes: int) -> None:
    """Fill `folder` by `write(aside)`, so that readers see the whole of it or nothing.

    Args:
        folder: the final place, inside the cache folder.
        source: what it is made from; kept in the marker file and compared by `is_complete`.
        write: writes the files into an empty folder beside the final place.
        num_bytes: how much room the work needs, files in passing included.

    Raises:
        OpdError: the disk is full or the folder cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free
        if free < num_bytes:
            raise OSError(errno.ENOSPC, f"{num_bytes / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free")
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder.parent) as scratch:
            aside = Path(scratch) / folder.name
            aside.mkdir()
            write(aside)
            files = {path.name: path.stat().st_size for path in sorted(aside.iterdir())}
            marker = {"source": dict(source), "files": files}
            (aside / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
            _swap_in(aside, folder, source)
    except OSError as error:
        full = error.errno == errno.ENOSPC
        raise OpdError(
            f"cannot write {folder}",
            why=f"the disk is full: {error.strerror}" if full else str(error),
            fix="free some room, or point OPD_CACHE at a folder on a larger disk"
            if full
            else "point OPD_CACHE at a folder that you can write to",
        ) from error


def _swap_in(aside: Path, folder: Path, source: Mapping[str, str]) -> None:
    """Rename `aside` to `folder`; a whole copy that another process put there meanwhile is as good as ours."""
    if is_complete(folder, source):
        return
    if folder.exists():
        folder.rename(aside.with_name("replaced"))
    try:
        aside.rename(folder)
    except OSError:
        if not is_complete(folder, source):
            raise


def notice(text: str) -> None:
    """Say something that the user must not miss, on standard error."""
    print(f"opd: {text}", file=sys.stderr, flush=True)
