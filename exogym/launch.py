"""The launcher: start a script's processes on one machine or several.

The names are defined in `exogym.machines.launch`.
"""

import sys
from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

if TYPE_CHECKING:
    from exogym.machines.launch import *  # noqa: F403
else:
    __getattr__, __dir__ = lazily(__name__)

if __name__ == "__main__":
    from exogym.machines.launch.__main__ import main

    sys.exit(main())
