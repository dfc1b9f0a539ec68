"""A run's records: history, metrics, observers, run folder."""
