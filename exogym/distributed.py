"""Process groups, collectives and data parallel training for your own scripts.

The names are defined in `exogym.machines.distributed`.
"""

import sys
from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

if TYPE_CHECKING:
    from exogym.machines.distributed import *  # noqa: F403
else:
    __getattr__, __dir__ = lazily(__name__)

if __name__ == "__main__":
    from exogym.machines.distributed.__main__ import main

    sys.exit(main())
