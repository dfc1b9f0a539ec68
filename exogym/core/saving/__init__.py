"""Saved state: checkpoints, the processes that write them, and exported models."""
