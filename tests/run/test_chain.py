"""Runs with Muon and AdamW in an OptimizerChain: the plain loop, resumes, every sharding, warnings and recipes."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from ray_adascale import AdaScaleConfig, LocalBackend, OptimizerChain, Run, Workload, attach, record_recipe
from ray_adascale.analysis.check import check_workload
from ray_adascale.data.order import epoch_order

LENGTH, B0, T = 64, 16, 40


def workload(config: dict[str, Any]) -> Workload:
    """Regression with three linear layers; the two LRs have schedules of their own."""
    torch.manual_seed(1)
    dtype = config.get("dtype", torch.float32)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)
    muon = Muon([model[0].weight, model[2].weight], lr=config.get("lr", 0.02))
    adamw = AdamW([model[0].bias, model[2].bias, *model[4].parameters()], lr=0.01)
    chain = OptimizerChain([muon, adamw])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(LENGTH, 6, generator=generator)
    y = x[:, :2].sin() + 0.3 * torch.randn(LENGTH, 2, generator=generator)
    cosine, linear = (lambda t: (1 + math.cos(math.pi * t / T)) / 2), (lambda t: 1 - t / T)
    return Workload(
        model=model,
        optimizer=chain,
        scheduler=LambdaLR(chain, [cosine, linear]),
        scheduler_unit="step",
        train_dataset=TensorDataset(x.to(dtype), y.to(dtype)),
        loss_fn=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    )


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def settings(**kwargs: Any) -> AdaScaleConfig:
    return AdaScaleConfig(
        **{"base_batch_size": B0, "total_steps": T, "report_every_s": math.inf, "async_checkpoint": False, **kwargs}
    )


def drive(backend: LocalBackend | None = None, stop: int | None = None, config: Any = None, **kwargs: Any) -> Run:
    """The run, to its end or to a number of steps."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="AdaScale is derived for SGD")
        warnings.filterwarnings("ignore", message="rule='adascale_betas' has no derivation")
        warnings.filterwarnings("ignore", message="The batch of .* exceeds the gradient noise scale")
        warnings.filterwarnings("ignore", message="The batch of .* is larger than the dataset")
        built = workload({} if config is None else config)
        run = Run.of(built, settings(**kwargs), backend=backend or LocalBackend(device="cpu"))
    for batch in run:
        run.backward(built.loss_fn(run.model, batch))
        run.step()
        if stop is not None and run.at_boundary and run.optimizer.steps == stop:
            break
    return run


def test_at_the_base_batch_it_is_the_plain_loop_of_two_optimizers() -> None:
    built = workload({})
    muon, adamw = (
        type(o)(o.param_groups[0]["params"], lr=lr)
        for o, lr in zip(built.optimizer.optimizers, (0.02, 0.01), strict=True)
    )
    schedulers = [LambdaLR(o, f) for o, f in zip((muon, adamw), built.scheduler.lr_lambdas, strict=True)]
    stream = torch.cat([epoch_order(LENGTH, seed=0, epoch=e) for e in range(T * B0 // LENGTH)]).view(-1, B0)
    for rows in stream:
        built.loss_fn(built.model, built.train_dataset[rows]).backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    run = drive()
    assert torch.equal(flat(run.module), flat(built.model))
    assert run.optimizer.steps == T


@pytest.mark.parametrize("rule", ["adascale", "adascale_betas"])
def test_a_run_resumes_to_the_last_bit(tmp_path: Path, rule: str) -> None:
    batch = {"per_worker_batch_size": 2 * B0, "accumulation": 2, "rule": rule, "checkpoint_every_s": 1e-6}
    whole = drive(**batch)
    assert T / 4 < whole.optimizer.steps < T
    drive(LocalBackend(tmp_path, device="cpu"), stop=7, **batch)
    resumed = drive(LocalBackend(tmp_path, device="cpu"), **batch)
    assert resumed.optimizer.steps == whole.optimizer.steps
    assert torch.equal(flat(resumed.module), flat(whole.module))
    a, b = (run.optimizer.state_dict()["state"] for run in (resumed, whole))
    assert all(torch.equal(a[i][key], b[i][key]) for i in b for key in b[i])


def _thin_matrix() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    chain = OptimizerChain([Muon([layer.weight for layer in model]), AdamW([layer.bias for layer in model])])
    data = TensorDataset(torch.zeros(LENGTH, 6))
    with pytest.raises(
        ValueError, match=r"Muon can't step the shards of fully_shard: .*shape \(2, 8\) .*over 3 workers"
    ):
        Run(model, chain, None, data, settings(sharding="fsdp2", rule="unscaled"), backend=LocalBackend(device="cpu"))


def test_muon_is_refused_where_torch_cannot_step_a_matrix_with_fewer_rows_than_workers(pool: Any) -> None:
    pool(3).run(_thin_matrix)


def _weights(sharding: str, **kwargs: Any) -> tuple[Tensor, int]:
    """Orthogonalized in float64: bfloat16 would make a rounding of the gradient a difference of the step."""
    with mock.patch.object(Tensor, "bfloat16", lambda t: t.clone()):
        run = drive(sharding=sharding, config={"dtype": torch.float64}, **kwargs)
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in run.module.parameters()]
    return torch.cat([p.detach().reshape(-1) for p in whole]), run.optimizer.steps


@pytest.mark.parametrize("rule", ["adascale", "adascale_betas"])
def test_a_run_is_the_same_under_every_sharding(pool: Any, rule: str) -> None:
    ends = {s: pool(2).run(_weights, s, rule=rule, per_worker_batch_size=B0) for s in ("none", "oss", "zero2", "fsdp2")}
    plain, steps = ends["none"][0]
    assert T / 2 < steps < T
    for sharding, results in ends.items():
        for found, number in results:
            assert number == steps
            # Roundings of 1e-16 in each of 30 steps; an orthogonalization of shards would differ by the size of the step, 1e-2.
            torch.testing.assert_close(found, plain, rtol=0, atol=1e-9, msg=sharding)


def _leg(folder: str, sharding: str, stop: int | None, rule: str) -> Tensor:
    backend = LocalBackend(folder, device="cpu")
    kwargs: dict[str, Any] = {
        "global_batch_size": 6 * B0,
        "accumulation": 2,
        "checkpoint_every_s": 1e-6,
        "rule": rule,
    }
    with mock.patch.object(Tensor, "bfloat16", lambda t: t.clone()):
        run = drive(backend, stop, {"dtype": torch.float64}, sharding=sharding, **kwargs)
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in run.module.parameters()]
    return torch.cat([p.detach().reshape(-1) for p in whole])


@pytest.mark.parametrize("rule", ["adascale", "adascale_betas"])
def test_a_resume_on_other_workers_with_another_sharding_goes_on(pool: Any, tmp_path: Path, rule: str) -> None:
    (expected, *_) = pool(2).run(_leg, str(tmp_path / "whole"), "none", None, rule)
    legs: list[tuple[int, str, int | None]] = [(2, "oss", 4), (3, "zero2", 8), (2, "fsdp2", 11), (3, "oss", None)]
    for workers, sharding, stop in legs:
        results = pool(workers).run(_leg, str(tmp_path / "run"), sharding, stop, rule)
    for found in results:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


# ---- words -----------------------------------------------------------------------------------------------------------


def test_the_warning_names_the_optimizers_and_their_evidence() -> None:
    with pytest.warns(UserWarning, match=r"With Muon and AdamW there is no proof, .* on two small .*results/muon\.md"):
        Run.of(workload({}), settings())
    with pytest.warns(UserWarning, match=r"measured on two small workloads with Muon and AdamW\. .*results/muon\.md"):
        Run.of(workload({}), settings(rule="adascale_betas"))
    built = workload({})
    own = {built.model[0].bias, built.model[2].bias}
    for p in set(built.model.parameters()) - own:
        p.requires_grad_(False)
    other = OptimizerChain([torch.optim.RMSprop([built.model[0].bias]), AdamW([built.model[2].bias])])
    with pytest.warns(UserWarning, match="with RMSprop and AdamW it was not"):
        Run(built.model, other, None, built.train_dataset, settings())


@pytest.mark.filterwarnings("ignore:rule='adamscale' is experimental")
def test_adams_metric_needs_adam_alone() -> None:
    with pytest.raises(ValueError, match="not OptimizerChain"):
        Run.of(workload({}), settings(rule="adamscale"))


@pytest.mark.filterwarnings("error")
def test_a_chain_of_sgd_is_sgd() -> None:
    built = workload({})
    chain = OptimizerChain([SGD([p], lr=0.1) for p in built.model.parameters()])
    Run(built.model, chain, None, built.train_dataset, settings())


def test_a_list_of_optimizers_is_refused_and_the_chain_is_named() -> None:
    built = workload({})
    both = list(built.optimizer.optimizers)
    named = r"list of 2\. Must be one\. .*ray_adascale\.OptimizerChain\(\["
    with pytest.raises(ValueError, match=named):
        Run(built.model, both, None, built.train_dataset, settings())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=named):
        Workload(model=built.model, optimizer=both, train_dataset=[1], loss_fn=built.loss_fn)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=named):
        attach(built.model, both, None, settings())  # type: ignore[arg-type]


# ---- search, forecast, check -----------------------------------------------------------------------------------------


def test_a_base_run_is_recorded_with_the_curve_of_each_group() -> None:
    recipe = record_recipe(workload, {}, base_batch_size=B0, total_steps=T, probe_every=5)
    assert (recipe.momentum, recipe.momentum_is_beta, recipe.optimizer_class) == (0.95, False, "Muon")
    assert [curve[0] for curve in recipe.lr_curve] == [0.02, 0.01]
    assert [curve[T // 2] for curve in recipe.lr_curve] == pytest.approx([0.01, 0.005])
    with pytest.raises(ValueError, match="learning-rate curve is not the recipe's"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Run.of(workload({"lr": 0.03}), AdaScaleConfig(), recipe=recipe)


def test_a_check_of_the_workload_finds_nothing_but_the_rules_doubt() -> None:
    found = check_workload(workload, {}, settings())
    assert [f.text for f in found if f.level == "failed"] == []
    (doubt,) = (f.text for f in found if f.level == "warning")
    assert "With Muon and AdamW there is no proof" in doubt
