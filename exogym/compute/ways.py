"""The ways of computing local steps, by the names that `fit(compute=)` takes; a further one is an entry here."""

from exogym.compute.compiled import Compiled
from exogym.compute.graphs import Graphs
from exogym.compute.loop import Loop
from exogym.compute.vmap import Vmap

WAYS: dict[str, type[Loop]] = {"loop": Loop, "vmap": Vmap, "compiled": Compiled, "graphs": Graphs}
