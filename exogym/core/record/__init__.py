"""What a run records: the history, metrics, observers (such as loggers), and the run folder."""
