"""What a run recorded: its history in memory, and the JSON files of its folder.

`exogym.runs` reads whole run folders.
"""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

__all__ = ["History", "read_object", "read_status", "versions"]

if TYPE_CHECKING:
    from exogym.core.record.history import History
    from exogym.core.record.run_folder import read_object, read_status, versions
else:
    __getattr__, __dir__ = lazily(__name__)
