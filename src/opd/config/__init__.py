"""Recipes: what a run is made of. Imports no torch, so that `opd --help` and config errors answer at once.

Read `schema.py` for the options, `load.py` for layers and overrides, `check.py` for the rules that span sections.
"""

from opd.config.load import LoadedRecipe, load_recipe
from opd.config.schema import Recipe

__all__ = ["LoadedRecipe", "Recipe", "load_recipe"]
