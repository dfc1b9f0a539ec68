"""Compute the local steps of one row or of many rows: losses, gradients and the inner optimizers' steps."""
