"""Saved state: checkpoints, the processes that keep them, exported models."""
