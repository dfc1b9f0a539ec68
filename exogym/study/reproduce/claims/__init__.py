"""The claims, a file for each family.

A new one is a `Claim` in one of the lists: cells, and checks (`exogym.study.reproduce.checks`), fixed before it is
trained.
"""
