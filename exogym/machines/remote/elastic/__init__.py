"""Runs that continue when hosts are lost: which processes take part, and how training goes on without the others."""
