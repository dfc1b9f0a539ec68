"""The plan and the files that `exogym wizard` makes, to train a task on measured hosts.

- `propose` chooses strategy, H and batch size, and estimates the time.
- `WizardRun` is the folder of a run that the wizard has prepared; `make_session` writes this folder.
- `hand_over` turns the trained model into files for its user.

`exogym/home/commands/wizard.py` asks the wizard's questions. An example: a plan for two measured computers, and a
folder with which the run can be repeated:

>>> import tempfile
>>> from exogym.network import Network
>>> links = Network.measured(all_reduce={4: 1e-3, 10_000: 2e-3}, num_nodes=2)
>>> plan: Proposal = propose(network=links, parameters=2410, steps=400, batch_size=4, step_s=[1e-3, 1e-3])
>>> fields = {"task": "digits", "strategy": plan.strategy, "steps": plan.steps, "batch_size": plan.batch_size}
>>> with tempfile.TemporaryDirectory() as folder:
...     session: WizardRun = make_session(folder, fields, {"master": "10.0.0.1", "workers": ["10.0.0.2"]}, sync=True)
...     session.command
'exogym distributed-train wizard --sync'
"""

from exogym.home.wizard.leaving import hand_over
from exogym.home.wizard.proposal import Proposal, propose
from exogym.home.wizard.session import WizardRun, make_session

__all__ = ["Proposal", "WizardRun", "hand_over", "make_session", "propose"]
