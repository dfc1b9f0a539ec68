"""Runs that continue when hosts are lost: membership, and recovery of training."""
