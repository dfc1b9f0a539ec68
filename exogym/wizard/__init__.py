"""What `exogym wizard` proposes and leaves behind: a plan for a task on measured hosts, and the files that repeat it.

`propose` chooses strategy, H and batch and says how long it should take, `Session` is the folder of such a run, and
`Taken` says how far the estimate was off. The questions are `exogym/cli/wizard.py`'s.
"""

from exogym.wizard.proposal import Proposal, propose
from exogym.wizard.session import Session, Taken, make_session

__all__ = ["Proposal", "Session", "Taken", "make_session", "propose"]
