"""Train with a strategy inside your own training loop, or inside another trainer.

`exogym.attach(model, optimizer, strategy)` turns the calling process into a node. Your loop computes the gradients, and
the returned `Nodes` does everything else that the strategy needs.
"""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

__all__ = ["NodeLoader", "Nodes", "attach"]

if TYPE_CHECKING:
    from exogym.attached.loading import NodeLoader
    from exogym.attached.nodes import Nodes, attach
else:
    __getattr__, __dir__ = lazily(__name__)
