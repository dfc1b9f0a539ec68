"""What a run recorded: its history in memory, and the JSON files of its folder.

`exogym.runs` reads whole run folders.
"""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

__all__ = ["History", "check_file", "read_file", "read_object", "read_status", "row_of", "rows_in", "versions"]

if TYPE_CHECKING:
    from exogym.core.record.history import History
    from exogym.core.record.run_folder import read_object, read_status, versions
    from exogym.core.record.schema import check_file, read_file, row_of, rows_in
else:
    __getattr__, __dir__ = lazily(__name__)
