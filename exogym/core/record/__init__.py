"""What is seen of a run: history and metrics."""
