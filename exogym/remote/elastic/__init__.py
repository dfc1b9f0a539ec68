"""Runs that go on when hosts are lost: the roll call, seats at it, and training between losses and returns."""
