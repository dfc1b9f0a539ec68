"""Find out how a model can be split: by its repeated blocks, by a plan for its layers, or by cuts between modules.

A model's class may define `tensor_plan` (styles by module name) and `cut_points` (a pattern of module names). A `*` in
a name stands for a number. Hugging Face's models have their own plan, and ExoGym uses it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

from torch import nn

from exogym.errors import ModelError
from exogym.mesh.value import NodeMesh

STYLES = ("colwise", "colwise_rep", "rowwise", "rowwise_rep")


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return, by name, the modules whose shards the devices gather one module at a time.

    These are the members of the model's outermost lists and sequences of modules, except members without trainable
    parameters and members that share a parameter with a module outside.

    >>> list(blocks_of(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))))
    ['0', '2']
    """
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        children = dict(module.named_children())
        is_inside = any(f"{name}.".startswith(f"{block}.") for block in found)
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(children) > 1 and not is_inside:
            found |= {f"{name}.{key}".lstrip("."): child for key, child in children.items()}
    uses, trained = _uses(model), {id(p) for p in model.parameters() if p.requires_grad}
    inner = {name: _uses(block) for name, block in found.items()}
    return {
        name: block
        for name, block in found.items()
        if inner[name].keys() & trained and all(uses[key] == count for key, count in inner[name].items())
    }


def _uses(module: nn.Module) -> Counter[int]:
    """Return how many modules hold each parameter."""
    return Counter(id(p) for part in module.modules() for p in part.parameters(recurse=False))


def tensor_plan(model: nn.Module) -> dict[str, str]:
    """Return the tensor split's style of each layer, by name; {} if the model has no known plan.

    With "colwise", each device computes a part of the outputs. With "colwise_rep", all devices then also gather all
    outputs. With "rowwise", each device has a part of the inputs, and the devices sum their results. "rowwise_rep" is
    like "rowwise", but each device has all inputs at first. Raise ModelError if the model's plan has a style that is
    not one of these.
    """
    plan = getattr(model, "tensor_plan", None) or _plan_of_hugging_face(model)
    names = [name for name, _ in model.named_modules()]
    found = {name: style for pattern, style in plan.items() for name in names if _matches(pattern, name)}
    for name, style in found.items():
        if style not in STYLES:
            raise ModelError(
                f"the plan of {type(model).__name__} splits {name!r} in the unknown style {style!r} "
                f"(known: {', '.join(STYLES)}): pass NodeMesh(parallelize=)"
            )
    return found


def _plan_of_hugging_face(model: nn.Module) -> dict[str, str]:
    plan = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    base = getattr(model, "base_model_prefix", "")
    prefix = f"{base}." if base and hasattr(model, base) else ""
    known = {"colwise_gather_output": "colwise_rep", "rowwise_split_input": "rowwise_rep"}
    return {prefix + name: known.get(style, style) for name, style in plan.items()}


def cuts(model: nn.Module, stages: int) -> list[str]:
    """Return the names of the modules after which the model is cut into `stages` of about equal size; [] if unknown.

    An `nn.Sequential` can be cut after each of its modules, other models at their `cut_points`.
    """
    pattern = "*" if isinstance(model, nn.Sequential) else getattr(model, "cut_points", None)
    if pattern is None:
        return []
    places = [name for name, _ in model.named_modules() if _matches(pattern, name)]
    if len(places) < stages:
        raise ModelError(
            f"{type(model).__name__} can be cut after {', '.join(places) or 'no module'}: that makes fewer than "
            f"{stages} stages. Lower stages, or correct the model's cut_points"
        )
    sizes = [sum(p.numel() for p in model.get_submodule(name).parameters()) for name in places]
    return [places[k - 1] for k in _even_cuts(sizes, stages)]


def _even_cuts(sizes: Sequence[int], parts: int) -> list[int]:
    """Return where to cut a list so that its largest part is as small as possible. Parts are not empty; ties cut late.

    >>> _even_cuts([1, 1, 1, 5], 2), _even_cuts([4, 0, 1], 2)
    ([3], [2])
    """
    least: dict[tuple[int, int], tuple[int, list[int]]] = {}
    for end in range(1, len(sizes) + 1):
        least[1, end] = sum(sizes[:end]), []
        for count in range(2, min(parts, end) + 1):
            ways = ((max(least[count - 1, at][0], sum(sizes[at:end])), -at) for at in range(count - 1, end))
            largest, at = min(ways)
            least[count, end] = largest, [*least[count - 1, -at][1], -at]
    return least[parts, len(sizes)][1]


def stages_of(model: nn.Module, mesh: NodeMesh) -> tuple[Callable[[str], int], list[str]]:
    """Return (device_of, cuts): a function from a parameter's name to its stage, and the cuts in order."""
    if mesh.depth == 1:
        return lambda name: 0, []
    if mesh.pipeline is None:
        found = cuts(model, mesh.depth)
        order = {name: k for k, (name, _) in enumerate(model.named_modules())}
        last = [max(k for name, k in order.items() if f"{name}.".startswith(f"{cut}.")) for cut in found]
        return lambda name: sum(order[name.rpartition(".")[0]] > end for end in last), found
    modules = {id(module): name for name, module in model.named_modules()}
    owner = {
        id(p): device
        for device, stage in enumerate(mesh.pipeline.stages)
        for p in (*stage.module.parameters(), *stage.module.buffers())
    }
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    by_name = {name: owner[id(x)] for name, x in named if id(x) in owner}
    ends = []
    for stage in mesh.pipeline.stages[:-1]:
        end = stage.layers[-1]
        while id(end) not in modules and isinstance(end, nn.Sequential) and len(end):
            end = end[-1]
        if id(end) not in modules:
            raise ModelError(
                f"the last layer of a stage is a {type(end).__name__} that is not in the model: end the stage with a "
                "module of the model"
            )
        ends.append(modules[id(end)])
    return lambda name: by_name.get(name, 0), ends


def stages_holding(model: nn.Module, device_of: Callable[[str], int]) -> dict[str, list[int]]:
    """Return, by a parameter's name, the pipeline devices that hold it, ascending. A tied parameter has several."""
    found: dict[int, set[int]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(p), set()).add(device_of(name))
    return {name: sorted(found[id(p)]) for name, p in model.named_parameters()}


def check_split(model: nn.Module, mesh: NodeMesh) -> None:
    """Refuse a model that `mesh` cannot split.

    Raise ModelError if no split is known or given; the number of attention heads is not a multiple of `mesh.tensor`;
    the given stages lack a parameter of the model, or have a parameter that is not in the model.
    """
    name = type(model).__name__
    if mesh.tensor > 1 and mesh.parallelize is None:
        if not tensor_plan(model):
            raise ModelError(
                f"tensor={mesh.tensor}: no plan to split the layers of {name} is known. Pass NodeMesh(parallelize=), "
                "use shard= instead, or give the model's class a tensor_plan"
            )
        for what in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(getattr(model, "config", None), what, None)
            if isinstance(heads, int) and heads % mesh.tensor:
                raise ModelError(
                    f"tensor={mesh.tensor} does not divide {what}={heads} of {name}: pass a divisor of {heads}"
                )
    if mesh.pipeline is not None:
        _check_by_hand(model, mesh)
    elif mesh.depth > 1 and not cuts(model, mesh.depth):
        raise ModelError(
            f"stages={mesh.depth}: no place to cut {name} is known. Pass NodeMesh(stages=PipelineParallel("
            "stages=[...])), or make the model an nn.Sequential"
        )


def _check_by_hand(model: nn.Module, mesh: NodeMesh) -> None:
    assert mesh.pipeline is not None
    theirs = {id(p) for stage in mesh.pipeline.stages for p in stage.module.parameters()}
    for name, p in model.named_parameters():
        if id(p) not in theirs:
            raise ModelError(f"no stage of the pipeline contains the model's parameter {name!r}: add it to a stage")
    if len(theirs) > len({id(p) for p in model.parameters()}):
        raise ModelError(
            "a stage of the pipeline contains a parameter that is not in the model: use the model's own modules"
        )


def _matches(pattern: str, name: str) -> bool:
    """Return whether a name fits a pattern, in which `*` stands for a number."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name) is not None
