"""Runs that survive the loss of hosts. A server decides which processes take part in training."""
