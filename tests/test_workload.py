from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ChainedScheduler, ReduceLROnPlateau, StepLR
from torch.utils.data import IterableDataset

from ray_adascale import AdaScaleConfig
from ray_adascale.workload import Workload, build, describe_config, unread_warning

from .samples_of import recipe


def mse(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


def parts(**changes: Any) -> dict[str, Any]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": StepLR(optimizer, 1),
        "scheduler_unit": "epoch",
        "train_dataset": torch.zeros(8, 2),
        "loss_fn": mse,
    } | changes


def workload(config: dict[str, Any]) -> Workload:
    config["seen"] = True
    return Workload(**parts())


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Refusing:
    """Like Ray Data's Dataset."""

    def __len__(self) -> int:
        raise AttributeError("use ds.count()")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"scheduler": None, "scheduler_unit": None},
        {"scheduler": None},
        {
            "metric": "accuracy",
            "mode": "max",
            "evaluate": lambda model: {"accuracy": 1.0},
        },
        {"train_dataset": Stream()},
        {"train_dataset": Refusing()},
        {"collate_fn": list},
    ],
)
def test_good_pieces_are_taken(changes: dict[str, Any]) -> None:
    Workload(**parts(**changes))


def test_frozen_parameters_may_stay_out_of_the_optimizer_and_schedulers_may_be_chained() -> (
    None
):
    pieces = parts()
    pieces["model"].bias.requires_grad_(False)
    optimizer = torch.optim.SGD([pieces["model"].weight], lr=0.1)
    Workload(
        **pieces
        | {
            "optimizer": optimizer,
            "scheduler": ChainedScheduler([StepLR(optimizer, 2)]),
        }
    )


def test_a_scheduler_of_timms_is_refused_with_what_to_use() -> None:
    timms = type("CosineLRScheduler", (), {"__module__": "timm.scheduler.cosine_lr"})()
    with pytest.raises(
        ValueError,
        match=r"torch's own: .*SequentialLR\(optimizer, \[LinearLR.*CosineAnnealingLR",
    ):
        Workload(**parts(scheduler=timms))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _with_model(model: nn.Module) -> dict[str, Any]:
    return {"model": model, "optimizer": sgd(model), "scheduler": None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": mse}, r"Invalid model: .*function.*nn\.Module"),
        ({"optimizer": []}, "one gain and one clock"),
        (
            {"optimizer": (sgd(nn.Linear(1, 1)), sgd(nn.Linear(1, 1)))},
            "tuple of 2.*several parameter groups",
        ),
        ({"optimizer": None}, "Invalid optimizer of type NoneType"),
        (
            {"optimizer": sgd(nn.Linear(2, 1))},
            "2 of the optimizer's 2 parameters are not in the model",
        ),
        (
            {"scheduler_unit": None},
            r"Missing scheduler_unit.*one scheduler\.step\(\) meant.*silently wrong",
        ),
        ({"scheduler_unit": "batch"}, "Invalid scheduler_unit='batch'"),
        ({"scheduler": [1]}, "Invalid scheduler: .*SequentialLR"),
        (
            {"scheduler": StepLR(sgd(nn.Linear(2, 1)), 1)},
            "The StepLR drives another optimizer",
        ),
        (
            {"scheduler": ReduceLROnPlateau(sgd(nn.Linear(2, 1)))},
            "ReduceLROnPlateau is not supported",
        ),
        ({"train_dataset": []}, "Invalid train_dataset: it is empty"),
        (_with_model(nn.LazyLinear(1)), "'weight' has no shape yet.*Call the model"),
        (
            _with_model(nn.Linear(2, 1, device="meta")),
            "'weight' is on the meta device.*to_empty",
        ),
        ({"loss_fn": None}, "Invalid loss_fn=None. Must be a function"),
        ({"evaluate": {"accuracy": 1}}, "Invalid evaluate"),
        ({"collate_fn": 3}, "Invalid collate_fn"),
        ({"metric": "accuracy"}, "Invalid metric='accuracy' without evaluate"),
        ({"metric": ""}, "Invalid metric=''"),
        (
            {"metric": "accuracy", "evaluate": lambda model: {"accuracy": 1.0}},
            r"Missing mode for metric='accuracy'\. Write mode='max' if a large",
        ),
        (
            {"mode": "max", "evaluate": lambda model: {"accuracy": 1.0}},
            "Invalid mode='max' with metric='loss'",
        ),
        ({"mode": "maximise"}, "Invalid mode='maximise'"),
    ],
)
def test_a_bad_piece_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Workload(**parts(**changes))


def test_build_gives_the_function_a_copy_of_the_config() -> None:
    config = {"layers": [1]}

    def greedy(config: dict[str, Any]) -> Workload:
        config["layers"].append(2)
        return workload(config)

    assert isinstance(build(greedy, config), Workload)
    assert config == {"layers": [1]}


SETTINGS = AdaScaleConfig(base_batch_size=16, total_steps=3000)


def given(
    read: Callable[[dict[str, Any]], object], **hyperparameters: Any
) -> tuple[Any, Workload]:
    """What ``read`` makes of the config of a workload's function, and the workload."""
    found: list[Any] = []

    def function(config: dict[str, Any]) -> Workload:
        found.append(read(config))
        return Workload(**parts())

    built = build(function, hyperparameters, SETTINGS)
    return found[0], built


@pytest.mark.parametrize(
    ("read", "found"),
    [
        (lambda c: (c["total_steps"], c["base_batch_size"]), (3000, 16)),
        (
            lambda c: (
                c.get("total_steps", 600),
                c.get("lr"),
                c.get("none", 5),
                c.get("no"),
            ),
            (3000, 0.1, 5, None),
        ),
        (lambda c: (c.pop("total_steps", 600), c.pop("total_steps", 600)), (3000, 600)),
        (lambda c: (c.setdefault("total_steps", 600), c["total_steps"]), (3000, 3000)),
        (lambda c: "total_steps" in c, True),
        (
            lambda c: [
                a["total_steps"]
                for a in (
                    c.copy(),
                    copy.copy(c),
                    copy.deepcopy(c),
                    pickle.loads(pickle.dumps(c)),
                )
            ],
            [3000] * 4,
        ),
        (lambda c: pickle.loads(pickle.dumps(c)), {"lr": 0.1}),
    ],
)
def test_a_function_may_ask_for_t_and_the_base_batch(
    read: Callable[[Any], Any], found: Any
) -> None:
    assert given(read, lr=0.1)[0] == found


@pytest.mark.parametrize(
    "read",
    [
        lambda c: (lambda **all: all)(**c),
        lambda c: {**c},
        dict,
        lambda c: json.loads(json.dumps(c)),
        lambda c: dict(c.items()),
        lambda c: {key: c[key] for key in c},
        lambda c: {} | c,
        lambda c: c | {},
        lambda c: dict(zip(c.keys(), c.values(), strict=True)),
    ],
)
def test_whoever_takes_all_of_the_config_gets_what_was_given_and_has_read_it(
    read: Callable[[Any], Any],
) -> None:
    """Or Settings(**config) would fail at a name that it doesn't know."""
    everything, built = given(read, lr=0.1, momentum=0.9)
    assert everything == {"lr": 0.1, "momentum": 0.9}
    assert built.config_reads is not None
    assert built.config_reads.unread == {}


def test_a_length_that_is_not_known_yet_says_what_to_give() -> None:
    with pytest.raises(KeyError, match="total_steps") as caught:
        build(
            lambda config: config["total_steps"],
            {},
            AdaScaleConfig(base_batch_size=4, total_epochs=2.5),
        )
    (note,) = caught.value.__notes__
    assert note.startswith(
        "With total_epochs T is not known yet. Give total_steps (--total-steps)"
    )
    with pytest.raises(KeyError, match="width") as caught:
        build(
            lambda config: config["width"],
            {},
            AdaScaleConfig(base_batch_size=4, total_epochs=2.5),
        )
    assert caught.value.__notes__ == ["A hyperparameter that is missing: width=VALUE."]


def test_what_is_given_comes_before_what_the_settings_say_and_t_may_be_unknown() -> (
    None
):
    asked = ("total_steps", "base_batch_size")
    assert given(lambda c: [c[key] for key in asked], total_steps=600)[0] == [600, 16]
    built: list[Any] = []

    def function(config: dict[str, Any]) -> Workload:
        built.append([config.get(key, "unknown") for key in asked])
        return Workload(**parts())

    build(function, {}, AdaScaleConfig(base_batch_size=4, total_epochs=2.5))
    build(function, {})
    # With a recipe, the function gets the settings that the search has given it. A
    # recipe by hand may list none.
    build(function, {}, SETTINGS, recipe([]))
    build(function, {}, SETTINGS, recipe([], search={"handed": ["base_batch_size"]}))
    assert built == [
        ["unknown", 4],
        ["unknown", "unknown"],
        ["unknown", "unknown"],
        ["unknown", 16],
    ]


def test_the_config_is_a_dict() -> None:
    def read(config: dict[str, Any]) -> object:
        assert isinstance(config, dict)
        assert config == {"lr": 0.1, "net": {"width": 3}}
        assert (len(config), repr(config)) == (2, "{'lr': 0.1, 'net': {'width': 3}}")
        config["seen"] = True
        del config["lr"]
        with pytest.raises(KeyError, match="lr"):
            config["lr"]
        return config.pop("net")["width"]

    assert given(read, lr=0.1, net={"width": 3})[0] == 3


def test_keys_that_nobody_reads_are_named_with_the_nearest_that_somebody_asked_for() -> (
    None
):
    def read(config: dict[str, Any]) -> Callable[[], Any]:
        config = config.copy()
        config["learning"] = 1  # its own
        list(config), len(config), repr(config)  # no values are read
        config.get("split", "train"), config.pop("momentum"), "total_steps" in config
        return lambda: config["late"]

    late, built = given(read, splitt="test", momentum=0.9, zzz=1, late=2)
    reads = built.config_reads
    assert reads is not None
    assert reads.unread == {"splitt": "split", "zzz": None, "late": None}
    late()
    assert reads.unread == {"splitt": "split", "zzz": None}
    assert "'splitt' (is 'split' meant?), 'zzz'" in unread_warning(reads.unread)
    assert replace(built, metric="loss").config_reads is reads


def test_build_says_what_came_back() -> None:
    with pytest.raises(
        TypeError, match=r"<lambda> returned None.*return statement missing"
    ):
        build(lambda config: None, {})  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match=r"returned a builtins\.tuple"):
        build(lambda config: (1, 2), {})  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("given", "note"),
    [
        ({"lr": "abc"}, ["lr='abc' is text, where a number may be needed."]),
        (
            {"lr": "0,1", "path": "/data", "unread": "x"},
            ["path='/data', lr='0,1' are text, where a number may be needed."],
        ),
        ({"lr": -1.0}, []),
    ],
)
def test_a_text_for_a_number_is_named_where_it_fails(
    given: dict[str, Any], note: list[str]
) -> None:
    def workload(config: dict[str, Any]) -> Workload:
        config.get("path")
        torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=config["lr"])
        raise AssertionError("accepted")

    with pytest.raises((TypeError, ValueError)) as caught:
        build(workload, given)
    assert getattr(caught.value, "__notes__", []) == note


@pytest.mark.parametrize(
    ("x", "label", "torchs", "note"),
    [
        (
            torch.zeros(3, 2, dtype=torch.float64),
            0,
            "dtype",
            "float64 [3, 2], int64 [3] from 0 to 0",
        ),
        (
            torch.zeros(3, 2),
            7,
            "out of bounds",
            "float32 [3, 2], int64 [3] from 7 to 7",
        ),
        (torch.zeros(3, 5), 0, "shapes", "float32 [3, 5]"),
    ],
)
def test_an_error_of_the_loss_says_what_the_batch_is(
    x: Tensor, label: int, torchs: str, note: str
) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch["x"]), batch["more"][0])

    made = Workload(**parts(loss_fn=loss_fn))
    with pytest.raises((RuntimeError, IndexError), match=torchs) as caught:
        made.loss(made.model, {"x": x, "more": (torch.full((3,), label), "text")})
    (said,) = caught.value.__notes__
    assert said.startswith(f"In loss_fn(model, batch), with {note}")
    assert "parameters of float32. Compare dtypes and shapes" in said


def test_an_error_of_the_loss_without_tensors_is_noted_too() -> None:
    made = Workload(**parts(loss_fn=lambda model, batch: batch.missing))
    with pytest.raises(AttributeError) as caught:
        made.loss(made.model, ["text", torch.zeros(0, dtype=torch.int64)])
    assert "with int64 [0] in the batch" in caught.value.__notes__[0]


def test_hyperparameters_on_one_line() -> None:
    assert (
        describe_config({"lr": 0.123456, "layers": [1] * 50})
        == f"lr=0.1235, layers={str([1] * 50)[:37]}..."
    )
    assert (
        describe_config({"lr": 1e-7, "name": "a", "depth": 12345678})
        == "lr=1e-07, name='a', depth=12345678"
    )
    assert describe_config({"text": "x" * 38}) == f"text='{'x' * 38}'"  # 40 characters
    assert describe_config({}) == "an empty config"
