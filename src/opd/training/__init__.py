"""The loop: rollout, score, update, record."""
