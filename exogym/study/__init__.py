"""Several runs: comparisons, sweeps, papers' claims, advice, and run folders."""
