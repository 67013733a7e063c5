"""What building.py does that no run on a CPU shows; the rest is tested through Run,
in test_loop.py.
"""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import TensorDataset

from ray_adascale import (
    AdamScaleRule,
    AdaScale,
    AdaScaleConfig,
    LEGWRule,
    Recipe,
    RuleInput,
    Run,
    attach,
)
from ray_adascale.optim.schedule import BaseSchedule
from ray_adascale.run.build import check_built, check_recipe, check_schedule, wrap
from ray_adascale.sharding.kinds.ddp import _settle_buckets

from ..placement import here
from ..pool import ProcessPool, fork_server, free_port
from ..samples_of import recipe

Pool = Callable[[int], ProcessPool]


def _bucket_layouts(settle: bool, device_ids: bool) -> list[list[list[int]]]:
    """The parameters of each bucket, by number, in each of two backward passes."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    # DDP at first goes by the order of registration, then by that in which gradients
    # came.
    late = nn.Parameter(torch.zeros(4))
    model.register_parameter("late", late)
    number = {p: i for i, p in enumerate(model.parameters())}
    ddp = DistributedDataParallel(
        model, bucket_cap_mb=1e-4, gradient_as_bucket_view=True
    )
    seen: list[list[int]] = []

    def hook(_, bucket):  # type: ignore[no-untyped-def] # DDP compares annotations with the classes
        seen.append([number[p] for p in bucket.parameters()])
        return allreduce_hook(ddp.process_group, bucket)

    ddp.register_comm_hook(None, hook)
    if device_ids:
        # as on a GPU: DDP then moves the forward pass's arguments itself
        ddp.device_ids = [0]
    if settle:
        _settle_buckets(ddp)
        assert all(p.grad is None for p in model.parameters())
    layouts = []
    for _ in range(2):
        seen.clear()
        (ddp(torch.ones(2, 4)).sum() + late.sum()).backward()
        layouts.append(list(seen))
    return layouts


@pytest.mark.also_simulated("cpu")
@pytest.mark.parametrize("device_ids", [False, True], ids=["cpu", "gpu"])
def test_buckets_of_the_first_step_are_those_of_all_later_ones(
    pool: Pool, device_ids: bool
) -> None:
    (before, after), _ = pool(2).run(_bucket_layouts, False, device_ids)
    assert before != after  # DDP does lay them out anew
    (before, after), _ = pool(2).run(_bucket_layouts, True, device_ids)
    assert before == after


class _OwnRule:
    """A rule of the user's: any callable, with the two things more that one may
    have.
    """

    metric = "adam"

    def __init__(self) -> None:
        self.curves: list[Any] = []

    def __call__(self, now: RuleInput) -> tuple[float, float]:
        return now.gain, now.gain

    def check_curve(self, curve: Any) -> None:
        self.curves.append(curve)


def _wrapped(rule: Any, **kwargs: Any) -> Any:
    config = AdaScaleConfig(
        base_batch_size=4, total_steps=10, accumulation=2, rule=rule, **kwargs
    )
    module = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    return wrap(
        module, optimizer, config, config.batch.plan(1), device=here(), total_steps=10
    )


@pytest.mark.parametrize(
    "rule", ["adamscale", AdamScaleRule(), _OwnRule()], ids=["by name", "object", "own"]
)
def test_a_rule_says_in_which_metric_it_wants_its_statistics(rule: Any) -> None:
    _wrapped(rule)
    with pytest.raises(ValueError, match="Adam's state of every parameter"):
        _wrapped(rule, sharding="oss")


def test_a_rule_is_shown_the_schedules_curve() -> None:
    rule = _OwnRule()
    schedule = BaseSchedule(
        base_batch_size=4,
        total_steps=2,
        scheduler_unit=None,
        base_steps_per_epoch=None,
        lr_curve=[[0.1, 0.2]],
    )
    check_schedule(
        None,
        schedule,
        AdaScaleConfig(base_batch_size=4, total_steps=2, rule=rule),
        None,
        4,
    )
    assert rule.curves == [[[0.1, 0.2]]]
    with pytest.warns(UserWarning, match="raising the LR"):
        check_schedule(
            None,
            schedule,
            AdaScaleConfig(base_batch_size=4, total_steps=2, rule=LEGWRule(1, 60)),
            None,
            4,
        )


@pytest.mark.parametrize(
    "curve",
    [[[0.1] * 10, [0.1] * 10], [[0.1] * 9 + [0.2]], [[0.1] * 9]],
    ids=["groups", "a value", "length"],
)
def test_the_error_of_another_curve_than_the_recipes_ends_its_sentences_once(
    curve: list[list[float]],
) -> None:
    found = recipe(
        [], 10, lr_curve=[[0.1] * 10], scheduler_unit="step", base_steps_per_epoch=None
    )
    schedule = BaseSchedule(
        base_batch_size=8,
        total_steps=10,
        scheduler_unit="step",
        base_steps_per_epoch=None,
        lr_curve=curve,
    )
    with pytest.raises(
        ValueError, match="The learning-rate curve is not the recipe's: "
    ) as raised:
        check_recipe(found, schedule)
    text = str(raised.value)
    assert not re.search(r"\.\s*[.:;,]", text), text
    assert ". Build optimizer and scheduler from" in text
    assert (
        "leave the recipe out and give base_batch_size=8 and total_steps=10 instead"
        in text
    )


def _warnings_of(
    optimizer: Any, recipe: Recipe | None = None, rule: str = "auto"
) -> list[str]:
    model = nn.Linear(2, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = AdaScaleConfig(base_batch_size=4, total_steps=10, rule=rule)
        check_built(model, optimizer(model.parameters(), lr=0.1), config, recipe)
    return [str(each.message) for each in caught]


def test_one_worker_warns_of_an_optimizer_that_adascale_is_not_derived_for(
    pool: Pool,
) -> None:
    (text,), others = pool(2).run(_warnings_of, torch.optim.AdamW, rule="adascale")
    assert text.startswith(
        "With rule='adascale' the averages of AdamW reach over r times"
    )
    assert others == []
    assert pool(2).run(_warnings_of, torch.optim.AdamW) == [[], []]
    assert pool(2).run(_warnings_of, SGD) == [[], []]
    assert pool(2).run(
        _warnings_of, SGD, recipe([], 10, search={"optimizer_class": "SGD"})
    ) == [[], []]
    (text,), others = pool(2).run(
        _warnings_of, SGD, recipe([], 10, search={"optimizer_class": "AdamW"})
    )
    assert text.startswith("The recipe was made with AdamW, and this run has SGD")
    assert others == []


def _outlives(rank: int, ports: list[int], queue: Any) -> None:
    torch.set_num_threads(1)
    for port in ports:
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
        )
        model = nn.Linear(4, 2)
        dataset = TensorDataset(torch.randn(16, 4), torch.randn(16, 2))
        config = AdaScaleConfig(base_batch_size=4, total_steps=1, sharding="none")
        run = Run(model, SGD(model.parameters(), lr=0.1), None, dataset, config)
        for x, y in run:
            run.backward(nn.functional.mse_loss(run.model(x), y))
            run.step()
        dist.destroy_process_group()
        del model, run, x, y
        gc.collect()
    queue.put(rank)


@pytest.mark.pool
def test_a_data_parallel_model_may_outlive_its_process_group() -> None:
    """On torch 2.13's gloo its destructor hung before the third life had ended,
    where it was the last to know the group.
    """
    context = fork_server()
    queue: Any = context.Queue()
    ports = [free_port() for _ in range(6)]
    processes = [
        context.Process(target=_outlives, args=(rank, ports, queue), daemon=True)
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    try:
        assert sorted(queue.get(timeout=90) for _ in processes) == [0, 1]
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.parametrize(
    ("kind", "rule", "match"),
    [
        (torch.optim.LBFGS, "adascale", "can't wrap LBFGS"),
        (torch.optim.RAdam, "adascale_memory", "not known to be exact with RAdam"),
    ],
)
def test_an_optimizer_that_is_refused_is_not_warned_of_first(
    kind: Any, rule: str, match: str
) -> None:
    """A warning would be an error here. That of LBFGS said that the run goes on."""
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match=match):
        check_built(
            model,
            kind(model.parameters()),
            AdaScaleConfig(base_batch_size=4, rule=rule),
            None,
        )


def test_a_model_in_data_parallel_is_refused() -> None:
    model = nn.DataParallel(nn.Linear(2, 1))
    with pytest.raises(ValueError, match="Pass the bare model"):
        check_built(
            model,
            SGD(model.parameters(), lr=0.1),
            AdaScaleConfig(base_batch_size=4),
            None,
        )


def meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(6, 3)


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3))


@pytest.mark.parametrize("client", ["run", "attach", "adascale"])
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (meta, r"on the meta device.*model\.to_empty"),
        (lazy, "of a lazy module.*Call the model once on an example"),
    ],
)
def test_parameters_without_numbers_are_refused(
    client: str, model: Callable[[], nn.Module], message: str
) -> None:
    made = model()
    optimizer = SGD(made.parameters(), lr=0.1)
    config = AdaScaleConfig(
        base_batch_size=4, total_steps=6, per_worker_batch_size=4, accumulation=2
    )
    with pytest.raises(ValueError, match=message):
        if client == "run":
            Run(made, optimizer, None, TensorDataset(torch.ones(8, 6)), config)
        elif client == "attach":
            attach(made, optimizer, None, config)
        else:
            AdaScale(optimizer, num_gradients_to_accumulate=2)
