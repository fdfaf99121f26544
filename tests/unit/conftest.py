"""Shapes and dtypes of `opd.loss` are checked at run time here, and only here."""

from __future__ import annotations

from jaxtyping import install_import_hook

# Kept installed for the session: the package may be imported by any test, and is annotated file by file.
install_import_hook("opd.loss", "beartype.beartype")
