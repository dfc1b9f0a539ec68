"""What is kept of a run: checkpoints, who keeps them, exported models."""
