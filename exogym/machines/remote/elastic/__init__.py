"""Runs that go on when hosts are lost: their membership, and training between losses and returns."""
