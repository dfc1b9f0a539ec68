"""The claims, one file per family.

To add a `Claim`, put it into one of the lists. Decide on its cells and checks (`research.reproduce.checks`) before
you train it.
"""
