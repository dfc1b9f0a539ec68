"""One thread and one random state for every test."""

import os
import random

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, and for the processes that tests start

import numpy as np
import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_random_state() -> None:
    """Start every test from the same random numbers, whichever tests ran before."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
