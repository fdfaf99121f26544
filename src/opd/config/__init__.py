"""Recipes: what a run is made of. Imports no torch, so that `opd --help` and config errors answer at once."""
