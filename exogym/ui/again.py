"""The form of a run: the options with which the page would start it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from exogym.errors import ArgumentError, retired
from exogym.network import Network
from exogym.options import in_full
from exogym.strategy.names import short_names
from exogym.strategy.registry import STRATEGIES, written_options
from exogym.study.compare.folder import Folder
from exogym.study.runs import what_is
from exogym.study.sweep.axes import arguments_of, as_text
from exogym.ui.repeat import axes_lines, seeds_of

Form = Sequence[Mapping[str, Any]]  # the options of `exogym.cli.ui.forms_of`


def again_of(path: Path, forms: Mapping[str, Form]) -> dict[str, Any]:
    """Return the `command` and `options` that repeat a run, comparison or sweep, and a `note` on what they leave out.

    A run of a comparison or sweep becomes a comparison of its strategy. A script's run becomes a comparison of its
    strategy on a task of ExoGym, because the form cannot start the script's model.
    """
    kind, about = what_is(path)
    parent, above = what_is(path.parent)
    notes: list[str] = []
    tasks = next((option["choices"] for option in forms["compare"] if option["name"] == "dataset"), ())
    if kind != "run":
        command = "sweep" if kind == "sweep" else "compare"
        given = _of_study(about.get("arguments") or {}, tasks, notes)
    elif parent != "run" and (found := _of_child(path, parent, above, tasks, notes)):
        command, given = "compare", found
    else:
        command, given = "compare", _of_script(about, notes)
    options, left_out = _in_form(forms[command], given)
    if left_out:
        notes.append(f"The form has no fields for these options: {', '.join(left_out)}.")
    return {"command": command, "options": options, "note": " ".join(notes)}


def _of_study(saved: Mapping[str, Any], tasks: Sequence[str], notes: list[str]) -> dict[str, Any]:
    """Return the options of a comparison or sweep from its saved arguments."""
    given = in_full(saved)
    seeds, problem = given.get("seeds"), given.pop("problem", None)
    if isinstance(seeds, list):
        given["seeds"] = len(seeds)
        if seeds != list(range(len(seeds))):
            notes.append(f"It had the seeds {', '.join(map(str, seeds))}; the form sets only their number.")
    if isinstance(problem, str) and (problem in tasks or ":" in problem):
        given["dataset"] = problem
    else:
        notes.append("Its model and data came from Python: choose a task.")
    if isinstance(given.get("speeds"), list):
        given["speeds"] = ",".join(map(str, given["speeds"]))
    if "axes" in given:
        given["axes"] = axes_lines(given["axes"])
    strategies = given.get("strategies")
    if isinstance(strategies, Mapping):
        strategies = [one if isinstance(one, str) else _text_of(one) for one in strategies.values()]
    if isinstance(strategies, list):
        given["strategies"] = ",".join(text for text in strategies if text)
    return given


def _of_child(
    path: Path, kind: str, above: Mapping[str, Any], tasks: Sequence[str], notes: list[str]
) -> dict[str, Any]:
    """Return the options of one run of a comparison or sweep; {} if the folder is not its run."""
    saved = above.get("arguments") or {}
    entries = above.get("cells" if kind == "sweep" else "strategies") or {}
    known = Folder(path.parent, entries)
    label = next((one for one in entries for seed in seeds_of(saved) if known.child(one, seed) == path), None)
    if label is None:
        return {}
    given = _of_study(saved, tasks, notes)
    if kind == "sweep":
        text, own = arguments_of(in_full(entries[label]), str(given.get("strategy", "diloco")))
        for name in ("axes", "search", "strategy", "processes", "engine"):
            given.pop(name, None)
        return given | own | {"strategies": text}
    return given | {"strategies": label}


def _of_script(about: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return the options of a script's run, from its description."""
    described = about.get("description") or {}
    notes.append("Its model and data are in its script, which the form cannot start. Choose a task.")
    known = {name: x for name, x in described.items() if name not in ("model", "data", "device", "strategy", "seed")}
    known |= {name: x for name, x in (described.get("limits") or {}).items() if name == "max_steps"}
    for name in ("limits", "placement", "chosen", "shared", "rounds"):
        known.pop(name, None)
    strategy, network = described.get("strategy"), known.get("network")
    if isinstance(network, Mapping):
        known["network"] = _network_text(network) or network
    return known | {"strategies": _text_of(strategy) or strategy, "seeds": 1}


def _text_of(strategy: Any) -> str:
    """Return a described strategy as text, with the options of its class that text can express; "" if unknown.

    >>> _text_of({"name": "DiLoCoStrategy", "H": 10, "eager": False, "max_norm": None, "own": 3})
    'diloco:H=10:eager=false'
    >>> _text_of({"name": "DiLoCoStrategy", "robust": "median"})
    ''
    """
    if not isinstance(strategy, Mapping):
        return ""
    name = short_names().get(str(strategy.get("name")), "")
    known = written_options(STRATEGIES[name]) if name in STRATEGIES else {}
    if any(value and option not in known and retired(option) for option, value in strategy.items()):
        return ""  # it has a wrapper, or is of an earlier version
    plain = {n: as_text(x) for n, x in strategy.items() if n in known and isinstance(x, bool | int | float | str)}
    fits = {n: text for n, text in plain.items() if text and not set(text) & set(",:=")}
    return ":".join([name, *(f"{n}={text}" for n, text in fits.items())]) if name else ""


def _network_text(described: Mapping[str, Any]) -> str:
    """Return a described network as text, such as "10Mbps,20ms"; "" if it needs more words."""
    try:
        text = f"{described['up'] / 1e6:g}Mbps,{described['latency'] * 1e3:g}ms"
        return text if Network.of(text).describe() == described else ""
    except (ArgumentError, KeyError, TypeError):
        return ""


def _in_form(form: Form, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the values that differ from the form's defaults, and the names of options that it cannot hold."""
    known, options, left_out = {option["name"]: option for option in form}, dict[str, Any](), list[str]()
    for name, value in given.items():
        option = known.get(name)
        if value is None or (option is not None and str(value) in (str(option["default"]), "[]")):
            continue
        is_list = isinstance(value, list) and all(isinstance(one, str) for one in value)
        if option is None or not ((is_list and option["multiple"]) or isinstance(value, bool | int | float | str)):
            left_out.append(name)
        elif option["is_flag"]:
            options[name] = True
        else:
            options[name] = value
    return options, left_out
