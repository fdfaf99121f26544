"""Samplers: prompts in as ids, completions out as ids with their log-probabilities."""
