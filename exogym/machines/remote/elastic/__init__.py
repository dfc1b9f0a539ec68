"""Runs that continue when hosts are lost. A server decides which processes take part in training."""
