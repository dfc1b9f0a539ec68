"""Files of a tool: written whole or not at all, and read only if they are regular files."""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

__all__ = ["end_of", "new_folder", "opened_regular", "regular_text", "replacing", "temporary_folder", "write_json"]

if TYPE_CHECKING:
    from exogym.core.base.files import (
        end_of,
        new_folder,
        opened_regular,
        regular_text,
        replacing,
        temporary_folder,
        write_json,
    )
else:
    __getattr__, __dir__ = lazily(__name__)
