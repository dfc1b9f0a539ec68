"""Where the blocks of the fleet live: in this process, in several, under torchrun."""
