"""Adapters that attach a strategy to another library's trainer through the trainer's own hooks."""
