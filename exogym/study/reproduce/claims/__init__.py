"""The claims, one file per family.

To add a `Claim`, put it into one of the lists. Fix its cells and checks (`exogym.study.reproduce.checks`) before
training it.
"""
