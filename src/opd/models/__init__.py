"""Model reference (hub id, local folder, `gguf:PATH`, `package:NAME`) -> model and tokenizer.

Importing this package imports neither torch nor transformers; its functions do.
"""

from opd.models.facts import ModelFacts, describe, load_tokenizer, same_vocabulary
from opd.models.loading import LoadedModel, known_device, load, load_adapter, pick_device, wrap
from opd.models.package import PACKAGES, Package, fetch

__all__ = [
    "PACKAGES",
    "LoadedModel",
    "ModelFacts",
    "Package",
    "describe",
    "fetch",
    "known_device",
    "load",
    "load_adapter",
    "load_tokenizer",
    "pick_device",
    "same_vocabulary",
    "wrap",
]
