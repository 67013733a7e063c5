"""A model's state by torch's own contract: a resume calls ``load_state_dict``, so
hooks, extra state and own loaders run.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, is_tensor, nn
from torch.ao.quantization import MovingAveragePerChannelMinMaxObserver
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.utils.data import TensorDataset

from ray_adascale import AdaScaleConfig, LocalBackend, Run, checkpoint, load_weights
from ray_adascale.checkpoint import CheckpointError
from ray_adascale.checkpoint.model import load_model, model_state

from ..samples_of import WaitingBackend

SHARDINGS = ["none", "oss", "zero2", "fsdp2"]

pytestmark = pytest.mark.filterwarnings(
    "ignore:The batch of .* exceeds the gradient noise scale"
)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(60, 6, generator=generator),
        torch.randint(2, (60,), generator=generator),
    )


def run_of(
    net: nn.Module, backend: LocalBackend, *, adamw: bool = False, **settings: Any
) -> Run:
    optimizer: torch.optim.Optimizer = torch.optim.SGD(
        net.parameters(), lr=0.1, momentum=0.9
    )
    if adamw:
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    config = AdaScaleConfig(
        **(
            {
                "base_batch_size": 4,
                "total_steps": 40,
                "checkpoint_every_s": 1e-9,
                "rule": "adascale",
            }
            | settings
        )
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="With rule=.adascale. the averages")
        return Run(net, optimizer, None, data(), config, backend=backend)


def steps(run: Run, count: int) -> None:
    """Take optimizer steps, each with a checkpoint."""
    for x, y in run:
        run.backward(F.cross_entropy(run.model(x), y))
        if run.step():
            count -= 1
        if count == 0:
            break


def resumed(
    make: Callable[[], nn.Module],
    folder: Path,
    make_again: Callable[[], nn.Module] | None = None,
) -> nn.Module:
    """Train three steps; start again; return both models, after a comparison of all
    parameters and their momenta.
    """
    first = make()
    run = run_of(first, WaitingBackend(folder))
    steps(run, 3)
    again = (make_again or make)()
    other = run_of(again, WaitingBackend(folder))
    assert other.effective_steps == 3
    for p, q in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(
            run.optimizer.state[p]["momentum_buffer"],
            other.optimizer.state[q]["momentum_buffer"],
        )
    return again


def net(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), *more, nn.ReLU(), nn.Linear(8, 2))


# ---- what state_dict() returns -------------------------------------------------------


class Copying(nn.Sequential):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return {
            key: value.cpu().clone() if is_tensor(value) else value
            for key, value in state.items()
        }


def test_a_state_dict_of_copies_is_loaded(tmp_path: Path) -> None:
    resumed(lambda: Copying(*net()), tmp_path)


def test_a_hook_that_copies_and_renames_is_called(tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = net()

        def renamed(
            module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
        ) -> None:
            state[f"{prefix}halves"] = torch.stack(
                state.pop(f"{prefix}0.weight").chunk(2)
            )

        def named_back(
            module: nn.Module, state: dict[str, Any], prefix: str, *_: Any
        ) -> None:
            state[f"{prefix}0.weight"] = torch.cat(list(state.pop(f"{prefix}halves")))

        model.register_state_dict_post_hook(renamed)
        model.register_load_state_dict_pre_hook(named_back)
        return model

    resumed(make, tmp_path)
    assert "halves" in load_weights(tmp_path)


def test_a_model_is_not_held_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, again = net(nn.BatchNorm1d(8)), net(nn.BatchNorm1d(8))
    with torch.no_grad():
        for p in again.parameters():
            p.zero_()
    tensors: dict[str, Any] = {}
    state = {"model": model_state(first, tensors, rank=0)}
    checkpoint.save(tmp_path / "one", tensors, state)
    monkeypatch.setattr(
        checkpoint.TensorInfo,
        "empty",
        lambda _: pytest.fail("a tensor beside the live one"),
    )
    load_model(checkpoint.Saved(tmp_path / "one"), again)
    for (name, p), q in zip(
        first.state_dict().items(), again.state_dict().values(), strict=True
    ):
        assert torch.equal(p, q), name


# ---- extra state ---------------------------------------------------------------------


class Counting(nn.Module):
    """Counts its calls, in extra state of any kind."""

    def __init__(self, save: Callable[[int], Any], load: Callable[[Any], int]) -> None:
        super().__init__()
        self.calls, self.save, self.load = 0, save, load

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x

    def get_extra_state(self) -> Any:
        return self.save(self.calls)

    def set_extra_state(self, state: Any) -> None:
        self.calls = self.load(state)


KINDS: dict[str, tuple[Callable[[int], Any], Callable[[Any], int]]] = {
    "tensor": (torch.tensor, int),
    "growing tensor": (torch.ones, len),
    "dict": (
        lambda calls: {
            "calls": calls,
            "of": [torch.tensor(calls), {"_orig_mod.x": torch.ones(calls)}],
        },
        lambda state: int(
            state["calls"]
            if state["of"][0] == len(state["of"][1]["_orig_mod.x"])
            else -1
        ),
    ),
    "number": (int, int),
    "None": (lambda calls: None, lambda state: 3),
}


@pytest.mark.parametrize("kind", KINDS)
def test_extra_state_is_restored(tmp_path: Path, kind: str) -> None:
    model = resumed(lambda: net(Counting(*KINDS[kind])), tmp_path)
    assert model[1].calls == 3  # type: ignore[index,union-attr]
    fresh = net(Counting(*KINDS[kind]))
    fresh.load_state_dict(load_weights(tmp_path))
    assert fresh[1].calls == 3


@pytest.mark.parametrize(
    ("state", "said"),
    [(io.BytesIO(), "a BytesIO"), ({1: 2}, "key 1"), ({"of": [{3}]}, "of/0: a set")],
)
def test_extra_state_of_another_kind_is_refused_when_the_run_is_built(
    tmp_path: Path, state: Any, said: str
) -> None:
    model = net(Counting(lambda calls: state, lambda state: 0))
    with pytest.raises(
        TypeError, match=rf"1\._extra_state.*{said}|{said}.*1\._extra_state"
    ):
        run_of(model, WaitingBackend(tmp_path))
    steps(run_of(model, WaitingBackend(None)), 1)  # it saves nothing


# ---- loaders of modules --------------------------------------------------------------


class Doubled(nn.Linear):
    """Saves twice its weight, with a version of its own."""

    _version = 7

    def _save_to_state_dict(
        self, destination: Any, prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = destination[f"{prefix}weight"] * 2

    def _load_from_state_dict(
        self, state: Any, prefix: str, metadata: Any, *args: Any
    ) -> None:
        assert metadata.get("version", 7) == 7
        state[f"{prefix}weight"] = state[f"{prefix}weight"] / 2
        super()._load_from_state_dict(state, prefix, metadata, *args)


def test_a_modules_own_loader_is_called_with_its_version(tmp_path: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(Doubled(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))

    resumed(make, tmp_path)
    state = checkpoint.Saved(next(iter(sorted(tmp_path.glob("checkpoint_*"))))).state
    # what is not {"version": 1}
    assert state["model"]["metadata"] == {"0": {"version": 7}, "1": {"version": 2}}
    make().load_state_dict(load_weights(tmp_path))


class Lazy(nn.Module):
    """Makes its buffer in the first forward pass."""

    def __init__(self, loads: bool) -> None:
        super().__init__()
        self.register_buffer("mean", None)
        self.loads = loads

    def forward(self, x: Tensor) -> Tensor:
        self.mean = x.detach().mean(0) if self.mean is None else self.mean
        return x - self.mean

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        if self.loads and f"{prefix}mean" in state:
            self.mean = torch.empty_like(state[f"{prefix}mean"])
        super()._load_from_state_dict(state, prefix, *args)


def test_a_buffer_that_the_first_forward_pass_makes_is_loaded_or_named(
    tmp_path: Path,
) -> None:
    model = resumed(lambda: net(Lazy(True)), tmp_path)
    assert torch.equal(model[1].mean, load_weights(tmp_path)["1.mean"])  # type: ignore[index,union-attr]
    with pytest.raises(
        CheckpointError,
        match=r'(?s)does not fit the model.*Unexpected key\(s\).*"1\.mean"',
    ):
        run_of(net(Lazy(False)), WaitingBackend(tmp_path))


class Observed(nn.Module):
    """Holds an observer of torch.ao, whose buffers grow from shape (0,), as in
    quantization-aware training.
    """

    def __init__(self) -> None:
        super().__init__()
        self.observer = MovingAveragePerChannelMinMaxObserver(ch_axis=1)

    def forward(self, x: Tensor) -> Tensor:
        self.observer(x.detach())
        return x


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max")
def test_buffers_that_change_their_shape_are_loaded(tmp_path: Path) -> None:
    model = resumed(lambda: net(Observed()), tmp_path)
    observer: Any = model[1].observer  # type: ignore[index,union-attr]
    assert torch.equal(observer.min_val, load_weights(tmp_path)["1.observer.min_val"])
    assert observer.min_val.shape == (8,)


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ([nn.LayerNorm(8)], [], r'Unexpected key\(s\).*"2\.bias"'),
        ([], [nn.LayerNorm(8)], r'Missing key\(s\).*"2\.weight"'),
        (
            [nn.Linear(8, 8)],
            [nn.Linear(8, 8, bias=False)],
            r'Unexpected key\(s\).*"1\.bias"',
        ),
        ([nn.PReLU()], [nn.PReLU(8)], r"size mismatch for 1\.weight"),
    ],
)
def test_keys_that_do_not_fit_are_named_in_both_directions(
    tmp_path: Path, before: list[nn.Module], now: list[nn.Module], said: str
) -> None:
    def make(more: list[nn.Module]) -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 8), *more, nn.Linear(8, 2))

    steps(run_of(make(before), WaitingBackend(tmp_path)), 1)
    with pytest.raises(
        CheckpointError,
        match=rf"(?s)checkpoint_0000000001 does not fit the model.*{said}",
    ):
        run_of(make(now), WaitingBackend(tmp_path))


def test_another_dtype_is_refused(tmp_path: Path) -> None:
    steps(run_of(net(), WaitingBackend(tmp_path)), 1)
    with pytest.raises(
        CheckpointError, match=r"0\.weight.*torch\.float32 of shape .* torch\.float64"
    ):
        run_of(net().double(), WaitingBackend(tmp_path))


# ---- wrappers, and names -------------------------------------------------------------


def unwrapped() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)),
        nn.Identity(),
        nn.Linear(8, 2),
    )


def with_checkpointing() -> nn.Sequential:
    model = unwrapped()
    model[0] = checkpoint_wrapper(model[0])
    return model


@pytest.mark.parametrize("first", [unwrapped, with_checkpointing])
def test_activation_checkpointing_may_be_switched_between_starts(
    tmp_path: Path, first: Callable[[], nn.Module]
) -> None:
    second = with_checkpointing if first is unwrapped else unwrapped
    run = run_of(first(), WaitingBackend(tmp_path), adamw=True)
    steps(run, 3)
    other = run_of(second(), WaitingBackend(tmp_path), adamw=True)
    for p, q in zip(run.module.parameters(), other.module.parameters(), strict=True):
        assert torch.equal(p, q)
        for name, value in run.optimizer.state[p].items():
            assert torch.equal(value, other.optimizer.state[q][name])
    for p, q in zip(run.module.buffers(), other.module.buffers(), strict=True):
        assert torch.equal(p, q)
    assert load_weights(tmp_path).keys() == unwrapped().state_dict().keys()


class Online(nn.Module):
    """A network under two names, as BYOL's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(
            nn.Linear(6, 8), *(nn.BatchNorm1d(8) for _ in range(4)), nn.Linear(8, 2)
        )
        self.encoder = nn.ModuleDict({"net": self.net})

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def averages(
    kind: str, folder: str, sharding: str
) -> tuple[list[float], list[float], list[float]]:
    """Train; return this worker's batch norm's averages, those in the checkpoint,
    and those after a resume.
    """
    make = {"two names": Online, "wrapper": with_checkpointing}[kind]

    def built() -> Run:
        return run_of(
            make(),
            WaitingBackend(folder, device="cpu"),
            sharding=sharding,
            per_worker_batch_size=4,
            total_steps=12,
        )

    run = built()
    steps(run, 2)
    saved = load_weights(folder)
    again = built()
    assert again.effective_steps == run.effective_steps

    def found(state: dict[str, Any]) -> list[float]:
        return [
            v
            for name, value in sorted(state.items())
            if name.endswith("running_mean")
            for v in value.tolist()
        ]

    return (
        found(run.module.state_dict()),
        found(saved),
        found(again.module.state_dict()),
    )


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("kind", ["two names", "wrapper"])
def test_rank_0s_averages_are_saved_whatever_their_names(
    pool: Any, tmp_path: Path, kind: str, sharding: str
) -> None:
    (first, saved, again), (other, _, others) = pool(2).run(
        averages, kind, str(tmp_path), sharding
    )
    assert first != other
    assert saved == again == others == first


def own_contract(folder: str, sharding: str, stop: int) -> tuple[list[float], int]:
    """Train a model with a state dict of copies, a loader of its own, and extra
    state.
    """
    torch.manual_seed(1)
    model = Copying(Doubled(6, 8), Counting(*KINDS["dict"]), nn.Linear(8, 2))
    backend = WaitingBackend(folder, device="cpu")
    run = run_of(model, backend, adamw=True, sharding=sharding, per_worker_batch_size=4)
    for x, y in run:
        run.backward(F.cross_entropy(run.model(x), y))
        if run.step() and run.state.iterations == stop:
            break
    whole = [
        p.full_tensor() if hasattr(p, "full_tensor") else p
        for p in model.state_dict().values()
        if is_tensor(p)
    ]
    return [v for p in whole for v in p.flatten().tolist()], model[1].calls  # type: ignore[return-value]


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_a_model_with_a_contract_of_its_own_resumes_under_every_sharding(
    pool: Any, tmp_path: Path, sharding: str
) -> None:
    whole = pool(2).run(own_contract, str(tmp_path / "whole"), sharding, 5)
    pool(2).run(own_contract, str(tmp_path / "cut"), sharding, 3)
    resumed = pool(2).run(own_contract, str(tmp_path / "cut"), sharding, 5)
    assert resumed[0] == whole[0]
    assert [calls for _, calls in resumed] == [5, 5]


def states_by_rank(folder: str) -> None:
    rank = torch.distributed.get_rank()
    kinds = [
        (lambda _: {"rank": rank, "of": torch.tensor(rank)}, int),
        (lambda _: torch.tensor(rank), int),
    ]
    model = nn.Sequential(*(Counting(*kind) for kind in kinds * 3))
    tensors: dict[str, Any] = {}
    state = {"model": model_state(model, tensors, rank=rank)}
    checkpoint.save(folder, tensors, state)


def test_extra_state_is_rank_0s(pool: Any, tmp_path: Path) -> None:
    pool(2).run(states_by_rank, str(tmp_path))
    found = load_weights(tmp_path)
    assert len(found) == 6
    for value in found.values():
        assert value == 0 if is_tensor(value) else value == {"rank": 0, "of": 0}


# ---- requires_grad -------------------------------------------------------------------


def with_frozen(*names: str) -> nn.Sequential:
    model = net(nn.LayerNorm(8))
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def frozen(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if not p.requires_grad}


def train_with_change(run: Run, until: int) -> list[Tensor]:
    """Take steps, and unfreeze the first weight, and freeze the last bias, before
    step 3.
    """
    for x, y in run:
        run.backward(F.cross_entropy(run.model(x), y))
        if not run.step():
            continue
        if run.state.iterations == 2:
            run.module.get_parameter("0.weight").requires_grad_(True)
            run.module.get_parameter("3.bias").requires_grad_(False)
            run.save_checkpoint()
        if run.state.iterations == until:
            break
    return [p.detach().clone() for p in run.module.parameters()]


@pytest.mark.parametrize("passes", [1, 2])
def test_what_the_loop_has_unfrozen_stays_unfrozen_in_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, passes: int
) -> None:
    def run(folder: Path) -> Run:
        net = with_frozen("0.weight", "0.bias")
        return run_of(
            net,
            WaitingBackend(folder),
            adamw=True,
            per_worker_batch_size=4,
            accumulation=passes,
        )

    whole = train_with_change(run(tmp_path / "whole"), 6)
    train_with_change(run(tmp_path / "cut"), 4)
    for _ in range(2):  # the second one resumes from the first one's checkpoints
        resumed = run(tmp_path / "cut")
        assert frozen(resumed.module) == {"0.bias", "3.bias"}
        with caplog.at_level("INFO"):
            steps(resumed, 1)
    assert all(
        torch.equal(p, q)
        for p, q in zip(resumed.module.parameters(), whole, strict=True)
    )
    with caplog.at_level("INFO"):
        run(tmp_path / "cut")
    assert (
        "the checkpoint's, as set in the loop, of 2 parameters: '0.weight', '3.bias'"
        in caplog.text
    )


def test_what_the_program_freezes_otherwise_than_before_stays_so_and_is_named(
    tmp_path: Path,
) -> None:
    train_with_change(
        run_of(with_frozen("0.weight", "0.bias"), WaitingBackend(tmp_path)), 3
    )
    with pytest.warns(
        UserWarning,
        match=r"is the program's, other than.*of 2 parameters: '0\.bias', '1\.weight'",
    ):
        run = run_of(with_frozen("0.weight", "1.weight"), WaitingBackend(tmp_path))
    # the loop's own change is restored all the same
    assert frozen(run.module) == {"1.weight", "3.bias"}
    steps(run, 1)
    assert frozen(
        run_of(with_frozen("0.weight", "1.weight"), WaitingBackend(tmp_path)).module
    ) == {
        "1.weight",
        "3.bias",
    }
    # Unfrozen by the loop and now by the program: no difference is left.
    assert frozen(run_of(with_frozen("1.weight"), WaitingBackend(tmp_path)).module) == {
        "1.weight",
        "3.bias",
    }


# ---- parameter groups ----------------------------------------------------------------


@pytest.mark.parametrize("by", ["the run's optimizer", "the user's"])
def test_a_group_that_the_loop_adds_is_refused_at_once(tmp_path: Path, by: str) -> None:
    model = net()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    model[2].requires_grad_(False)
    config = AdaScaleConfig(base_batch_size=4, total_steps=40)
    run = Run(model, optimizer, None, data(), config, backend=WaitingBackend(tmp_path))
    added = run.optimizer if by == "the run's optimizer" else optimizer
    group = {"params": list(model[2].requires_grad_(True).parameters())}
    with pytest.raises(
        RuntimeError,
        match=r"add_param_group.*when it is built.*requires_grad_\(False\)",
    ):
        added.add_param_group(group)
    model[2].requires_grad_(False)
    for x, y in run:
        run.backward(F.cross_entropy(run.model(x), y))
        run.step()
        with pytest.raises(RuntimeError, match="add_param_group"):
            added.add_param_group(group)
        break
    assert len(run.optimizer.param_groups) == 1
    optimizer.add_param_group(group)  # after the loop the optimizer is the user's again
