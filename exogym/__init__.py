"""ExoGym: simulate distributed training of neural networks on one machine, and measure what each method costs and gives."""

from exogym.trainer import LocalTrainer, Trainer

__version__ = "0.1.0"
__all__ = ["LocalTrainer", "Trainer", "__version__"]
