"""Training at home, on the computers of one network: finding them, the wizard, speech and language models."""
