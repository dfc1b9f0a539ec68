"""The strategies as the page completes them: what the constructors say, and nothing else."""

import pytest

from exogym.core.training.options import FitOptions
from exogym.errors import ArgumentError, check_choice
from exogym.strategy.registry import STRATEGIES, parse_strategy, written_options
from exogym.study.compare.catalog import NO_CHOICE, catalog, choices_of

NOT_TEXT = {"privacy", "local_steps", "offsets", "inner_lr", "personal"}  # objects, lists, and a second name


def test_each_option_of_each_constructor_is_there_with_its_words() -> None:
    found = catalog()
    ours = {
        name: kind for name, kind in STRATEGIES.items() if kind.__module__.startswith("exogym.")
    }  # not other tests'
    assert found.keys() >= {"single", *ours} and next(iter(found)) == "single"
    for name, kind in ours.items():
        known = written_options(kind)
        options = {option["name"]: option for option in found[name]["options"]}
        assert known.keys() - options.keys() <= NOT_TEXT and options.keys() <= known.keys(), name
        for option in options.values():
            assert len(option["help"]) > 5 and "see `" not in option["help"][:5].lower(), (name, option)


def test_each_choice_is_taken_and_no_other_text() -> None:
    for name, about in catalog().items():
        name = "ddp" if name == "single" else name
        for option in about["options"]:
            if not option["choices"] or option["name"] == "inner_optim" or option["name"] == "outer_optim":
                continue
            for choice in option["choices"]:
                try:
                    parse_strategy(f"{name}:{option['name']}={choice}")
                except ArgumentError as error:  # it may contradict another option, but it is a choice
                    assert not error.choices and "is not one of" not in str(error), (name, option["name"], choice)
            with pytest.raises(ArgumentError, match=option["name"]):
                parse_strategy(f"{name}:{option['name']}={NO_CHOICE}")


def test_choices_and_references() -> None:
    options, of_diloco = (
        {option["name"]: option for option in catalog()[name]["options"]} for name in ("sparta_diloco", "diloco")
    )
    assert options["H"]["choices"] == [] and of_diloco["eager"]["choices"] == ["true", "false"]
    assert options["compression_method"]["choices"] == ["random", "sequential", "partitioned", "topk"]
    assert options["outer_lr"]["help"] == of_diloco["outer_lr"]["help"]  # the docstring refers to DiLoCo


def test_choices_of_a_run() -> None:
    assert choices_of("precision") == ["fp32", "bf16", "fp16"] and choices_of("balance") == ["nodes", "batch", "steps"]
    assert FitOptions.compute in choices_of("compute") and choices_of("val_size") == []


def test_an_error_about_choices_has_them() -> None:
    with pytest.raises(ArgumentError) as caught:
        check_choice("way", "east", ("left", "right"))
    assert caught.value.choices == ("left", "right")
    assert ArgumentError("other").choices == ()
