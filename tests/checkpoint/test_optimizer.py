"""Optimizer state through a checkpoint and back, for any split, so that training goes
on to the last bit.

Functions whose names start with an underscore run on each rank of the pool. All ranks
see the same batches, without DDP, so that what comes out does not depend on the number
of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer
from torch.optim.lr_scheduler import StepLR

from ray_adascale import OSS, AdaScale, OptimizerChain, checkpoint
from ray_adascale.checkpoint import CheckpointError, TensorShard
from ray_adascale.checkpoint.optimizer import (
    hyperparameters,
    load_hyperparameters,
    load_optimizer,
    optimizer_tensors,
    parameter_names,
)

from ..pool import ProcessPool
from ..uneven import (
    OPTIMIZERS,
    Net,
    assert_same,
    batches,
    build,
    groups,
    train,
    weights,
)

Pool = Callable[[int], ProcessPool]

MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    **OPTIMIZERS,
    "amsgrad": lambda m: AdamW(groups(m), lr=0.01, amsgrad=True),
    # a state entry that is neither an average nor "step"
    "nadam": lambda m: NAdam(m.parameters(), lr=0.01),
    "rmsprop": lambda m: torch.optim.RMSprop(
        m.parameters(), lr=0.01, momentum=0.5, centered=True
    ),
}


def save(folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """What the loop saves, less what is not of the optimizer."""
    tensors: dict[str, Any] = {
        f"model/{key}": value for key, value in model.state_dict().items()
    }
    tensors.update(optimizer_tensors(optimizer, parameter_names(model, optimizer)))
    checkpoint.save(folder, tensors, {"param_groups": hyperparameters(optimizer)})


def load(folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
    checkpoint.Saved(folder).load(
        {f"model/{key}": value for key, value in model.state_dict().items()}
    )
    load_optimizer(
        checkpoint.Saved(folder), optimizer, parameter_names(model, optimizer)
    )
    load_hyperparameters(optimizer, checkpoint.Saved(folder).state["param_groups"])


def fresh(name: str, wrap: str, low: torch.dtype = torch.float32) -> tuple[Net, Any]:
    model = build(low)
    optimizer: Any = MAKERS[name](model)
    if "oss" in wrap:
        optimizer = OSS.wrap(optimizer)
    if "adascale" in wrap:
        optimizer = AdaScale(optimizer, scale=1.0)
    return model, optimizer


def _leg(
    name: str, wrap: str, low: torch.dtype, source: Path | None, target: Path, seed: int
) -> tuple[Tensor, Any]:
    """Resume from ``source``, train on, save to ``target``."""
    model, optimizer = fresh(name, wrap, low)
    if source is not None:
        load(source, model, optimizer)
    train(model, optimizer, batches(5, seed))
    save(target, model, optimizer)
    return weights(model), hyperparameters(optimizer)


@pytest.mark.timeout(300)  # the first test of a lane starts three pools
@pytest.mark.also_simulated("momentum-f32", "adamw-bf16", "tensor-lr-f32")
@pytest.mark.parametrize("low", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", MAKERS)
def test_goes_on_to_the_last_bit_over_every_split(
    pool: Pool, tmp_path: Path, name: str, low: torch.dtype
) -> None:
    """Plain, sharded over two, over one, over three, and plain again, against one
    run that never stopped.
    """
    # A CPU rounds bfloat16 differently at the end of a tensor than in its middle, so
    # there cuts by element show.
    # Muon has the matrix of bfloat16, whole
    exact = low is torch.float32 or name in ("odd", "chain")
    twin, plain = fresh(name, "", low)
    legs = [(0, ""), (2, "oss"), (1, "oss"), (3, "oss adascale"), (0, "adascale")]
    source: Path | None = None
    for i, (world_size, wrap) in enumerate(legs):
        target = tmp_path / str(i)
        if world_size:
            results = pool(world_size).run(_leg, name, wrap, low, source, target, i)
        else:
            results = [_leg(name, wrap, low, source, target, i)]
        train(twin, plain, batches(5, i))
        for end, saved in results:
            torch.testing.assert_close(
                end, weights(twin), rtol=0 if exact else 4e-3, atol=0 if exact else 4e-3
            )
            assert saved == hyperparameters(plain)
        checkpoint.verify(target)
        source = target
    # The same keys, dtypes and values as of the optimizer that never stopped, in
    # whatever split they were saved.
    save(tmp_path / "twin", twin, plain)
    stored = {}
    for folder in (tmp_path / "twin", tmp_path / "4"):
        stored[folder.name] = {
            key: torch.empty(info.shape, dtype=info.dtype)
            for key, info in checkpoint.Saved(folder).index.items()
        }
        checkpoint.Saved(folder).load(stored[folder.name])
    if exact:
        assert_same(stored["4"], stored["twin"])
    else:
        kinds = [
            {key: (value.dtype, value.shape) for key, value in entry.items()}
            for entry in stored.values()
        ]
        assert kinds[0] == kinds[1]


def test_keys_say_what_is_stored() -> None:
    model, optimizer = fresh("odd", "")
    train(model, optimizer, batches(1))
    tensors = optimizer_tensors(optimizer, parameter_names(model, optimizer))
    mine = {key: value for key, value in tensors.items() if "first.weight/" in key}
    assert {key: (value.dtype, tuple(value.shape)) for key, value in mine.items()} == {
        "optim.int/first.weight/seen": (torch.int64, ()),
        "optim.float/first.weight/decay": (torch.float64, ()),
        "optim.float/first.weight/with%2Fslash": (torch.float64, ()),
        "optim.bool/first.weight/odd": (torch.bool, ()),
        "optim.none/first.weight/unset": (torch.bool, ()),
        # as many elements, not of the parameter's shape
        "optim.tensor/first.weight/flat": (torch.float32, (63,)),
        "optim.tensor/first.weight/rows": (torch.int64, (2, 3)),
        "optim/first.weight/average": (torch.float64, (63,)),
    }


def test_tensors_are_live_and_shards_where_sharded() -> None:
    model, optimizer = fresh("momentum", "")
    train(model, optimizer, batches(1))
    key = "optim/middle.weight/momentum_buffer"
    names = parameter_names(model, optimizer)
    flat = optimizer_tensors(optimizer, names)[key]
    live = optimizer.state[model.middle.weight]["momentum_buffer"]
    assert isinstance(flat, Tensor)
    assert flat.data_ptr() == live.data_ptr()
    shard = optimizer_tensors(AdaScale(OSS.wrap(optimizer)), names)[key]
    assert isinstance(shard, TensorShard)
    assert (shard.tensor.data_ptr(), shard.offset, shard.numel) == (
        live.data_ptr(),
        0,
        81,
    )


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", ["momentum", "adamw", "odd"])
def test_before_the_first_step(tmp_path: Path, name: str, sharded: bool) -> None:
    wrap = "oss" if sharded else ""
    model, optimizer = fresh(name, wrap)
    names = parameter_names(model, optimizer)
    assert optimizer_tensors(optimizer, names) == {}
    save(tmp_path, model, optimizer)
    # Into an optimizer that has stepped: it is as if it had not.
    other, used = fresh(name, wrap)
    train(other, used, batches(3))
    load(tmp_path, other, used)
    assert not any(used.state.values())
    train(model, optimizer, batches(5, 1))
    train(other, used, batches(5, 1))
    assert torch.equal(weights(model), weights(other))


def test_state_keeps_its_strides(tmp_path: Path) -> None:
    """Fused kernels refuse averages that are laid out in another way than the
    weights.
    """

    def new() -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten()).to(
            memory_format=torch.channels_last
        )
        return model, AdamW(model.parameters(), lr=0.1)

    model, optimizer = new()
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    save(tmp_path, model, optimizer)
    other, loaded = new()
    load(tmp_path, other, loaded)
    assert_same(loaded.state_dict(), optimizer.state_dict())


def _another_layout(
    folder: Path, before: torch.memory_format, after: torch.memory_format
) -> list[bool]:
    """Save the momentum of a convolution that is split by element, load it into
    another layout; whether parts were whole.
    """
    momentum = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(1))
    whole = []
    for layout in (before, after):
        model = nn.Conv2d(3, 4, 2).to(memory_format=layout)  # type: ignore[call-overload]
        optimizer = OSS.wrap(SGD(model.parameters(), lr=0.1, momentum=0.9))
        if layout is before:
            model.weight.grad = torch.empty_like(model.weight).copy_(momentum)
            optimizer.step()
            save(folder, model, optimizer)
    load(folder, model, optimizer)
    for fragment in optimizer.fragments:
        if fragment.param is model.weight:
            loaded = optimizer.optim.state[fragment.tensor]["momentum_buffer"]
            assert torch.equal(loaded, fragment.of(momentum))
            whole.append(fragment.whole)
    return whole


@pytest.mark.parametrize("channels_last", ["before", "after"])
def test_a_part_of_a_parameter_loads_into_another_layout(
    pool: Pool, tmp_path: Path, channels_last: str
) -> None:
    layouts = [
        torch.channels_last if when == channels_last else torch.contiguous_format
        for when in ("before", "after")
    ]
    assert pool(2).run(_another_layout, tmp_path, *layouts) == [[False], [False]]


class OwnLoader(SGD):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for entry in self.state.values():
            entry["average"] = entry["average"].half()


def test_each_optimizer_of_a_chain_loads_in_its_own_way(tmp_path: Path) -> None:
    model = nn.Linear(3, 2).to(torch.bfloat16)

    def chain() -> OptimizerChain:
        return OptimizerChain(
            [SGD([model.weight], lr=0.1), OwnLoader([model.bias], lr=0.1)]
        )

    optimizer = chain()
    optimizer.state[model.weight] = {"average": torch.full((2, 3), 1.001)}
    optimizer.state[model.bias] = {"average": torch.ones(2)}
    save(tmp_path, model, optimizer)
    other = chain()
    load(tmp_path, model, other)
    assert_same(
        other.state[model.weight]["average"], torch.full((2, 3), 1.001)
    )  # not bfloat16, as torch's loader casts it
    assert other.state[model.bias]["average"].dtype == torch.float16


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"history": [1, 2]}, "'history' of weight in SGD: it is a list"),
        ({"note": "words"}, "'note' of weight in SGD: it is a str"),
        ({"nested": {"a": 1.0}}, "'nested' of weight in SGD: it is a dict"),
        ({"phase": 1j}, "'phase' of weight in SGD: it is a complex"),
        ({"large": 2**63}, "'large' of weight in SGD: it is a int"),
        ({7: 1.0}, "state 7 in SGD: its name is not a string"),
    ],
)
@pytest.mark.parametrize("sharded", [False, True])
def test_state_that_does_not_fit_is_refused_by_name(
    entry: dict[Any, Any], message: str, sharded: bool
) -> None:
    model = nn.Linear(3, 2)
    optimizer: Optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight] = entry
    if sharded:
        optimizer = OSS.wrap(optimizer)
    with pytest.raises(TypeError, match=message):
        optimizer_tensors(optimizer, parameter_names(model, optimizer))


def test_state_of_no_parameter_is_refused_by_name() -> None:
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.state["global"] = {"k": 1}  # type: ignore[index]
    with pytest.raises(TypeError, match="'global' in SGD: it belongs to no parameter"):
        optimizer_tensors(optimizer, parameter_names(model, optimizer))


@pytest.mark.parametrize(
    "value", [2**63 - 1, -(2**63), 0.1, float("inf"), True, None, -0.0]
)
def test_numbers_come_back_with_their_kind(tmp_path: Path, value: Any) -> None:
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight] = {"x": value}
    save(tmp_path, model, optimizer)
    other = SGD(model.parameters(), lr=0.1)
    load(tmp_path, model, other)
    found = other.state[model.weight]["x"]
    assert (type(found), repr(found)) == (type(value), repr(value))


def test_a_parameter_of_another_size_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    save(tmp_path, model, optimizer)
    wider = nn.Linear(4, 2)
    other = SGD(wider.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(CheckpointError, match=r"holds 6 elements, and weight has 8"):
        load_optimizer(checkpoint.Saved(tmp_path), other, parameter_names(wider, other))


# ---- names ---------------------------------------------------------------------------


def test_parameters_are_named_by_the_model_and_others_by_place() -> None:
    class Confusing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # Names that a fallback by number could be taken for.
            self.parameter = nn.ParameterList([torch.zeros(2), torch.zeros(3)])

    model = Confusing()
    outside = nn.Parameter(torch.zeros(4))
    optimizer = SGD([{"params": [outside]}, {"params": model.parameters()}], lr=0.1)
    names = parameter_names(model, optimizer)
    assert names[model.parameter[0]] == "parameter.0"
    assert names[model.parameter[1]] == "parameter.1"
    assert len(set(names.values())) == 3
    # A module with an empty name is what nn.Module itself refuses, so this one is
    # nobody else's.
    assert names[outside] == ".0"


def test_a_parameter_outside_the_model_keeps_its_state(tmp_path: Path) -> None:
    def new() -> tuple[Net, nn.Parameter, Optimizer]:
        model = build()
        outside = nn.Parameter(torch.ones(3))
        return model, outside, SGD([*model.parameters(), outside], lr=0.1, momentum=0.9)

    model, outside, optimizer = new()
    outside.grad = torch.ones(3)
    optimizer.step()
    save(tmp_path, model, optimizer)
    other, its_outside, loaded = new()
    load(tmp_path, other, loaded)
    assert_same(loaded.state[its_outside], optimizer.state[outside])


def test_a_shared_weight_is_stored_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    keys = optimizer_tensors(optimizer, parameter_names(model, optimizer))
    assert sorted(keys) == [
        f"optim/{name}/momentum_buffer" for name in ("0.bias", "0.weight", "1.bias")
    ]


# ---- hyperparameters -----------------------------------------------------------------


def test_hyperparameters_are_json_and_come_back() -> None:
    model = build()
    optimizer = AdamW(groups(model), lr=0.01, betas=(0.8, 0.95))
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    train(model, optimizer, batches(2), scheduler)
    saved = json.loads(json.dumps(hyperparameters(optimizer)))
    other = AdamW(groups(build()), lr=0.01)
    load_hyperparameters(other, saved)
    for ours, theirs in zip(other.param_groups, optimizer.param_groups, strict=True):
        assert {k: v for k, v in ours.items() if k != "params"} == {
            k: v for k, v in theirs.items() if k != "params"
        }
    assert other.param_groups[0]["betas"] == (0.8, 0.95)
    assert [group["initial_lr"] for group in other.param_groups] == [0.02, 0.01, 0.01]
    assert other.param_groups[1]["lr"] == 0.01 * 0.25


def test_how_a_step_is_computed_follows_the_machine() -> None:
    saved = hyperparameters(
        AdamW(build().parameters(), lr=0.01, foreach=False, capturable=False)
    )
    assert not {"foreach", "fused", "capturable", "differentiable", "params"} & set(
        saved[0]
    )
    other = AdamW(build().parameters(), lr=0.01, foreach=True)
    load_hyperparameters(other, saved)
    assert other.param_groups[0]["foreach"] is True


def test_a_tensor_lr_is_filled_in_place() -> None:
    def new() -> Adam:
        return Adam(build().parameters(), lr=torch.tensor(0.1), foreach=False)

    optimizer = new()
    optimizer.param_groups[0]["lr"].fill_(0.3)
    saved = json.loads(json.dumps(hyperparameters(optimizer)))
    other = new()
    live = other.param_groups[0]["lr"]
    load_hyperparameters(other, saved)
    # a compiled step or a captured graph goes on to read this one
    assert other.param_groups[0]["lr"] is live
    assert torch.equal(live, torch.tensor(0.3))
    # And between a number and a tensor, either way.
    number = Adam(build().parameters(), lr=0.1)
    load_hyperparameters(number, saved)
    # the nearest float32
    assert number.param_groups[0]["lr"] == pytest.approx(0.3, rel=1e-7)
    load_hyperparameters(other, hyperparameters(Adam(build().parameters(), lr=0.2)))
    assert torch.equal(live, torch.tensor(0.2))


def test_lists_stay_lists_and_the_rest_of_a_group_is_left_alone() -> None:
    model = build()

    def new(k: int) -> SGD:
        groups = [
            {
                "params": model.parameters(),
                "milestones": [k, 2 * k],
                "pair": (k, k),
                "hook": len,
            }
        ]
        return SGD(groups, lr=0.1)

    first = new(1)
    with pytest.warns(UserWarning, match="'hook' \\(builtin_function_or_method\\)"):
        saved = json.loads(json.dumps(hyperparameters(first)))
    assert "hook" not in saved[0]
    assert hyperparameters(first) == hyperparameters(first)  # says so once
    other = new(5)
    load_hyperparameters(other, saved)
    assert other.param_groups[0]["milestones"] == [1, 2]
    assert other.param_groups[0]["pair"] == (1, 1)
    assert other.param_groups[0]["hook"] is len
    named = AdamW(model.named_parameters(), lr=0.1)
    before = list(named.param_groups[0]["param_names"])
    load_hyperparameters(named, json.loads(json.dumps(hyperparameters(named))))
    assert named.param_groups[0]["param_names"] == before


def _consolidated_after_load(folder: Path) -> None:
    model, optimizer = fresh("momentum", "oss")
    train(model, optimizer, batches(1))
    optimizer.consolidate_state_dict(-1)
    load(folder, model, optimizer)
    if dist.get_world_size() > 1:
        with pytest.raises(RuntimeError, match="consolidate_state_dict"):
            optimizer.state_dict()  # not that of before
    assert optimizer.state is optimizer.optim.state
    assert set(optimizer.state) <= {f.tensor for f in optimizer.fragments}


@pytest.mark.parametrize("world_size", [1, 2])
def test_loading_replaces_a_consolidated_state(
    pool: Pool, tmp_path: Path, world_size: int
) -> None:
    model, optimizer = fresh("momentum", "")
    train(model, optimizer, batches(3))
    save(tmp_path, model, optimizer)
    pool(world_size).run(_consolidated_after_load, tmp_path)
