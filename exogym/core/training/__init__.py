"""Training a strategy: the driver, the training loop, and the code that assembles a run."""
