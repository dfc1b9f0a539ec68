"""The atlas: every method tuned with the same budget, then measured on held-out data with fresh seeds.

A `Place` is a task with a number of nodes. At each place, each method gets K trials: its defaults first, then settings
that optuna proposes within the method's declared ranges. The best trial is the trial with the lowest loss on validation
data. The atlas then trains the best trial's settings and the defaults again with three other seeds, and measures the
loss on test data. `Table` holds one row for each run, and tables can be merged.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     studies: list[Study] = studies_of([Place("digits", 4)], ["ddp", "diloco"])
...     atlas = Atlas(folder, studies, trials=8)
...     table = Table(f"{folder}/atlas.json")  # empty so far
>>> [str(study) for study in atlas.studies], table.rows, PLACES[1].nodes
(['digits-4, ddp', 'digits-4, diloco'], [], 4)
>>> atlas.finals_of(atlas.studies[0])  # unknown before all trials
{}
"""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

__all__ = ["PLACES", "Atlas", "Place", "Study", "Table", "studies_of"]

if TYPE_CHECKING:
    from research.atlas.places import PLACES, Place, studies_of
    from research.atlas.table import Table
    from research.atlas.training import Atlas, Study
else:
    __getattr__, __dir__ = lazily(__name__)
