"""Recipes measured against each other and against their controls."""
