"""From a batch to a step of one row or many: losses, gradients, inner optimizers."""
