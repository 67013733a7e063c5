"""Runs a case with the package, start by start: on gloo processes where there are
several workers, else in this process.
"""

from __future__ import annotations

import math
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import default_collate

from ray_adascale import (
    AdaScale,
    AdaScaleConfig,
    EarlyStop,
    LEGWRule,
    LinearRule,
    LocalBackend,
    OptimizerChain,
    Recipe,
    RuleInput,
    Run,
    ShardedGradScaler,
    StepPlan,
    TauSchedule,
    Workload,
    attach,
    record_recipe,
)
from ray_adascale._torch import is_dtensor
from ray_adascale.integrations.client import follow_batch
from ray_adascale.optim.adascale import AdaScaleOptimizer
from ray_adascale.optim.rules import make_rule
from ray_adascale.run.base.base_noise import StepNoise
from ray_adascale.run.base.base_run import base_config
from ray_adascale.scaling_rules import adam_preconditioner
from ray_adascale.sharding.kinds.fsdp2 import shard_model
from ray_adascale.sharding.kinds.zero2 import ShardedDataParallel
from ray_adascale.sharding.oss import OSS

from .base import (
    Row,
    base_hyperparameters,
    base_steps_per_epoch,
    calls_at,
    examples_of,
    own_batches,
)
from .case import (
    Case,
    Leg,
    added_group,
    dataset,
    frozen_names,
    in_wide_precision,
    judged,
    loss_of,
    make_quiet,
    net,
    optimizers,
    sampled_order,
    scheduler,
    score_of,
    units_of,
)

Pools = Callable[[int], Any]


def drive(case: Case, pools: Pools) -> tuple[list[Row], Tensor]:
    """Return the rows of the run and the weights at its end.

    Raises:
        Exception: The run failed. On several workers it is a ``RankFailed`` with the
            traceback as its text.
    """
    rows: list[Row] = []
    weights = buffers = torch.empty(0)
    with tempfile.TemporaryDirectory() as folder:
        for i, leg in enumerate(case.legs):
            args = case, i, len(rows), folder
            results = (
                [_leg(*args)]
                if leg.workers == 1
                else pools(leg.workers).run(_leg, *args)
            )
            for result in results:
                if isinstance(result, Refused):
                    if not result.expectable and leg.workers > 1:
                        # other workers may still wait in a collective
                        pools(leg.workers).kill()
                    raise result
            rows += _same(results)
            _, weights, buffers = results[0]
            if (
                case.via != "checkpoint"
                and len(case.legs) > i + 1
                and len(rows) < sum(x.steps or 0 for x in case.legs[: i + 1])
            ):
                break  # at T
    return rows, torch.cat([weights, buffers])


_Result = tuple[list[Row], Tensor, Tensor]
"""Rows, weights and buffers of a worker's start. Workers may have other buffers;
rank 0's count.
"""


def _same(results: list[_Result]) -> list[Row]:
    """Return the rows with the examples of all workers, and rank 0's scores. Other
    numbers must be the same on all workers.
    """
    first, weights, _ = results[0]
    joined = []
    for i, row in enumerate(first):
        seen = [rows[i].seen[0] for rows, *_ in results]
        for rank, (rows, *_) in enumerate(results):
            a, b = (
                {**vars(r), "seen": None, "score": r.score is None}
                for r in (row, rows[i])
            )
            assert repr(a) == repr(b), f"step {i}: rank {rank} has {b}, rank 0 {a}"
        joined.append(Row(**{**vars(row), "seen": seen}))
    for rank, (rows, theirs, _) in enumerate(results):
        assert len(rows) == len(first), (
            f"rank {rank} took {len(rows)} steps, rank 0 {len(first)}"
        )
        assert torch.equal(weights, theirs), (
            f"rank {rank} has other weights than rank 0"
        )
    return joined


class Refused(Exception):
    """An error that a worker raised, with its traceback as text.

    Attributes:
        expectable: Whether it is one of settings that can't work, or of the bare model:
            the other workers raise it, too.
    """

    def __init__(self, text: str, expectable: bool) -> None:
        super().__init__(text, expectable)
        self.expectable = expectable

    def __str__(self) -> str:
        return str(self.args[0])


def _leg(case: Case, number: int, taken: int, folder: str) -> Any:
    torch.set_num_threads(1)
    with warnings.catch_warnings(), in_wide_precision():
        warnings.simplefilter("ignore", UserWarning)
        try:
            legs = {"run": _run_leg, "base": _base_run}
            leg = legs.get(case.client, _own_loop)
            return leg(case, number, taken, folder)
        except Exception as error:
            expectable = isinstance(
                error, ValueError
            ) or "run.model(...) was not called" in str(error)
            return Refused(traceback.format_exc(), expectable)


def _built(case: Case, leg: Leg) -> tuple[nn.Module, Optimizer, Any]:
    module = net(case)
    members = optimizers(case, module, leg.lr)
    optimizer = members[0] if len(members) == 1 else OptimizerChain(members)
    return module, optimizer, scheduler(case, optimizer, leg.total)


def _rule(case: Case) -> Any:
    if case.rule == "legw":
        return LEGWRule(0.1, case.length)
    if case.rule == "cautious":
        return _cautious
    return LinearRule(steps=7) if case.rule == "lsw+" else case.rule


def _length(case: Case, leg: Leg) -> dict[str, Any]:
    """Return the setting of T."""
    if case.by_epochs is None:
        return {"total_steps": leg.total}
    steps = leg.total + case.by_epochs
    return {"total_epochs": steps / base_steps_per_epoch(case, leg)}


def _schedule_of_base(case: Case, leg: Leg, schedule: Any) -> dict[str, Any]:
    """Return the settings of B0, T and the scheduler's unit, unless a recipe has
    them.
    """
    if case.recipe:
        return {}
    return {
        "base_batch_size": leg.base,
        "scheduler_unit": None if schedule is None else case.unit,
        **_length(case, leg),
    }


def _recipe(case: Case, leg: Leg) -> Recipe | None:
    """Return the recipe of a base run that has trained as this program does."""
    if not case.recipe:
        return None
    per_epoch = base_steps_per_epoch(case, leg)
    unit = None if case.scheduler is None else case.unit
    calls = 1 + calls_at(case, leg, leg.total)
    points = base_hyperparameters(case, leg)[: 1 if unit is None else calls]
    return Recipe(
        hyperparameters={},
        base_batch_size=leg.base,
        total_steps=leg.total,
        base_steps_per_epoch=per_epoch,
        scheduler_unit=unit,  # type: ignore[arg-type]
        metric="score",
        mode="min",
        score=1.0,
        lr_curve=[
            [float(groups[k]["lr"]) for groups in points] for k in range(len(points[0]))
        ],
        noise=[],
        seed=0,
        search={},
        workload="",
        versions={},
        created="2026-01-01T00:00:00+00:00",
        settings={"grad_clip": case.clip if isinstance(case.clip, float) else None},
    )


def _cautious(now: RuleInput) -> tuple[float, float]:
    factor = 1 + (now.gain - 1) / 2
    return factor, factor


def _order(case: Case) -> Any:
    return (lambda epoch: sampled_order(case.length, epoch)) if case.sampled else None


def _poisoned(case: Case, step: int, first_pass: bool, loss: Tensor) -> Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    if step == case.spike:
        loss = 8 * loss
    return loss * math.inf if first_pass and (step, rank) in case.poison else loss


def _freeze(case: Case, module: nn.Module, step: int) -> None:
    frozen = frozen_names(case, step)
    for name, p in module.named_parameters():
        p.requires_grad_(name not in frozen)


def _look(case: Case, model: nn.Module, step: int) -> None:
    """Evaluate as a user's loop does, with what it is called by in training, and go
    on in train mode.
    """
    if case.looks is not None and step % case.looks == 0:
        model.eval()
        with torch.no_grad():
            score_of(case, model)
        model.train()
        make_quiet(case, model, step)


def _hook(module: nn.Module) -> None:
    next(module.parameters()).register_hook(lambda grad: 3 * grad)


class _PlantedError(Exception):
    pass


@contextmanager
def _fails(module: nn.Module, fails: bool) -> Iterator[None]:
    """A context in which a backward pass fails, if it is to, after most gradients
    were accumulated.
    """

    def fail(grad: Tensor) -> None:
        raise _PlantedError

    first = next(p for p in module.parameters() if p.requires_grad)
    handle = first.register_hook(fail) if fails else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


class _Watch:
    """Records the LR that each group steps with."""

    def __init__(self, optimizer: AdaScale) -> None:
        inner = optimizer.wrapped
        self._groups = optimizer
        self.lrs: list[float] = []
        innermost = inner.optim if isinstance(inner, OSS) else inner
        parts = (
            innermost.optimizers
            if isinstance(innermost, OptimizerChain)
            else [innermost]
        )
        parts[0].register_step_pre_hook(self._read)

    def _read(self, *_: Any) -> None:
        self.lrs = [float(group["lr"]) for group in self._groups.param_groups]


def _row(
    optimizer: AdaScale,
    lrs: list[float],
    seen: list[list[int]],
    score: float | None = None,
    skipped: bool = False,
) -> Row:
    last, nan = optimizer.last_step, math.nan
    if last.skipped or skipped:
        return Row(
            True, last.gain, last.effective_steps, nan, nan, nan, nan, [], [seen], score
        )
    means = optimizer.average_moments()
    return Row(
        False,
        last.gain,
        last.effective_steps,
        last.sigma2,
        last.mu2,
        *means,
        lrs,
        [seen],
        score,
    )


def _weights(module: nn.Module) -> Tensor:
    whole = [p.detach() for p in module.parameters()]
    whole = [p.full_tensor() if is_dtensor(p) else p for p in whole]
    return torch.cat([p.reshape(-1).double() for p in whole])


def _buffers(module: nn.Module) -> Tensor:
    found = [b.reshape(-1).double() for b in module.buffers() if b.is_floating_point()]
    return torch.cat([torch.empty(0), *found])


# ---- Run -----------------------------------------------------------------------------


def _run_leg(case: Case, number: int, taken: int, folder: str) -> _Result:
    leg = case.legs[number]
    module, optimizer, schedule = _built(case, leg)
    _freeze(case, module, 0)  # the program's, at each start; the loop changes it
    make_quiet(case, module, taken)
    if case.hooked is not None and case.hooked < taken:
        _hook(module)
    config = AdaScaleConfig(
        **_schedule_of_base(case, leg, schedule),
        per_worker_batch_size=leg.per_worker,
        accumulation=leg.passes,
        global_batch_size=leg.batch,
        elastic=leg.elastic,
        rule=_rule(case),
        sharding=leg.sharding,
        precision=case.precision,
        grad_clip=case.clip,
        averaging_window=case.window,
        measure_every=case.measure_every,
        seed=case.seed,
        shuffle=case.shuffle,
        drop_last=case.drop_last,
        num_loader_workers=case.loaders,
        dataset_length=case.length if case.iterable else None,
        batch_schedule=",".join(f"{start}:{batch}" for start, batch in case.batches)
        if case.by_text
        else list(case.batches) or None,
        target_efficiency=case.efficiency,
        evaluate_every=case.evaluate,
        early_stop=_early_stop(case),
        find_unused_parameters=case.net == "branch" or bool(case.frozen),
        accept_changes=leg.accept,
        checkpoint_every_s=math.inf,
        report_every_s=math.inf,
    )
    backend = LocalBackend(folder if len(case.legs) > 1 else None, device="cpu")
    scores: list[float] = []

    def evaluate(bare: nn.Module) -> dict[str, float]:
        scores.append(score_of(case, bare))
        return {"score": judged(scores[-1])}

    data: Any = dataset(case)
    if case.iterable:
        assert leg.per_worker is not None
        data = _Batches(
            data, own_batches(case, backend.rank, leg.workers, leg.per_worker)
        )
    clock = _Clock(case.starting)
    run = Run(
        module,
        optimizer,
        schedule,
        data,
        config,
        recipe=_recipe(case, leg),
        backend=backend,
        after_step=clock.advance if case.followed else None,
        extra_state={"clock": clock} if case.followed else None,
        evaluate=evaluate if case.evaluate else None,
        weight_of=(lambda batch: units_of(batch[3]).sum()) if case.units else None,
        sampler=_order(case),
        collate_fn=default_collate if case.collated else None,
        starting_step=case.starting,
    )
    watch = _Watch(run.optimizer)
    rows: list[Row] = []
    seen: list[list[int]] = []
    caught = case.caught

    def train() -> None:
        nonlocal caught, seen
        for x, tokens, y, index in run:
            step, fails = taken + len(rows), caught == (taken + len(rows), len(seen))
            if not seen:
                scores.clear()  # of the untrained model
                if step == case.quiet:
                    make_quiet(case, module, step)
                if frozen_names(case, step) != frozen_names(case, step - 1):
                    _freeze(case, module, step)
                if step == case.hooked and (
                    case.caught is None or caught is not None or case.caught[0] != step
                ):
                    _hook(module)
                _look(
                    case, run.module, step
                )  # last: under FSDP2 it leaves whole weights, and what is set on these is lost
            model = run.module if case.bare_model else run.model
            loss = loss_of(case, model, x, tokens, y, index)
            if fails:
                caught = None
            with _fails(module, fails):
                run.backward(_poisoned(case, step, not seen, loss))
            seen.append(index.tolist())
            if run.step():
                rows.append(_row(run.optimizer, watch.lrs, seen, *scores))
                seen, scores[:] = [], []
                if (
                    len(rows) == leg.steps
                    and run.stopped is None
                    and run.effective_steps < run.total_steps
                ):
                    if number + 1 < len(case.legs):
                        run.save_checkpoint()
                    return

    try:
        train()
    except _PlantedError:
        seen = []
        train()
    tau = run.effective_steps
    if case.followed and abs(clock.tau - tau) > 1e-9 * tau:
        raise AssertionError(f"after_step has counted {clock.tau}, and τ is {tau}")
    if scores:
        rows[-1] = replace(rows[-1], score=scores[-1])
    return rows, _weights(run.module), _buffers(run.module)


def _early_stop(case: Case) -> EarlyStop | None:
    if case.patience is None:
        return None
    steps, mode = case.patience
    return EarlyStop(patience=steps, metric="score", mode=mode)  # type: ignore[arg-type]


class _Clock:
    """Counts the effective steps by the gains that ``after_step`` gets."""

    def __init__(self, starting: int) -> None:
        self.tau = float(starting)

    def advance(self, module: nn.Module, gain: float) -> None:
        self.tau += gain

    def state_dict(self) -> dict[str, float]:
        return {"tau": self.tau}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.tau = state["tau"]


class _Batches:
    """An iterable of batches."""

    def __init__(self, data: Any, indices: list[list[int]]) -> None:
        self._data, self._indices = data, indices

    def __iter__(self) -> Iterator[Any]:
        return (self._data[rows] for rows in self._indices)


# ---- a base run ----------------------------------------------------------------------


def _base_run(case: Case, number: int, taken: int, folder: str) -> _Result:
    leg = case.legs[number]
    module, optimizer, schedule = _built(case, leg)
    make_quiet(case, module, 0)
    lrs: list[list[float]] = []
    parts = (
        optimizer.optimizers if isinstance(optimizer, OptimizerChain) else [optimizer]
    )
    parts[0].register_step_pre_hook(
        lambda *_: lrs.append([float(group["lr"]) for group in optimizer.param_groups])
    )

    def workload(config: Any) -> Workload:
        return Workload(
            model=module,
            optimizer=optimizer,
            scheduler=schedule,
            scheduler_unit=None if schedule is None else case.unit,  # type: ignore[arg-type]
            train_dataset=dataset(case),
            loss_fn=lambda model, batch: loss_of(case, model, *batch[:3]),
        )

    config = AdaScaleConfig(
        grad_clip=case.clip,
        shuffle=case.shuffle,
        drop_last=case.drop_last,
        find_unused_parameters=case.net == "branch",
        averaging_window=case.window,
    )
    if leg.workers > 1:
        return _base_run_on_workers(case, leg, workload(None), config)
    recipe = record_recipe(
        workload,
        {},
        base_batch_size=leg.base,
        **_length(case, leg),
        seed=case.seed,
        config=config,
        probe_every=case.probe_every,
    )
    noise = {probe.effective_steps: (probe.sigma2, probe.mu2) for probe in recipe.noise}
    nan = math.nan
    rows = [
        Row(False, 1.0, i + 1.0, *noise.get(float(i), (nan, nan)), nan, nan, each, [[]])
        for i, each in enumerate(lrs)
    ]
    return rows, _weights(module), _buffers(module)


def _base_run_on_workers(
    case: Case, leg: Leg, workload: Workload, config: AdaScaleConfig
) -> _Result:
    """Train a base run as the workers of a trial do, without Tune."""
    length = {"total_steps": None, "total_epochs": None, **_length(case, leg)}
    base = replace(
        base_config(config, leg.base, seed=case.seed, **length),
        global_batch_size=leg.base,
        per_worker_batch_size=leg.per_worker,
        accumulation=leg.passes,
        sharding=leg.sharding,
    )
    noise: dict[float, tuple[float, float]] = {}

    class Backend(LocalBackend):
        def listeners(self, tracker: Any) -> list[Any]:
            return [
                StepNoise(
                    case.probe_every,
                    on_noise=lambda probe: noise.update(
                        {probe.effective_steps: (probe.sigma2, probe.mu2)}
                    ),
                    on_loss=lambda loss: None,
                )
            ]

    run = Run.of(workload, base, backend=Backend(None, device="cpu"))
    watch = _Watch(run.optimizer)
    rows: list[Row] = []
    for batch in run:
        run.backward(workload.loss(run.model, batch))
        if run.step():
            rows.append(_row(run.optimizer, watch.lrs, []))
    due = {
        row.tau - 1: (row.sigma2, row.mu2)
        for row in rows
        if (row.tau - 1) % case.probe_every == 0
    }
    if run.backend.rank == 0:
        assert noise == due, f"{noise} were recorded of {due}"
    return rows, _weights(run.module), _buffers(run.module)


# ---- a loop of one's own -------------------------------------------------------------


def _wrapped(
    module: nn.Module, optimizer: Optimizer, sharding: str, unused: bool
) -> tuple[nn.Module, Optimizer]:
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    if alone and sharding not in ("oss", "zero2"):
        return module, optimizer
    if sharding == "fsdp2":
        shard_model(module, optimizer, torch.device("cpu"))
        return module, optimizer
    if sharding in ("oss", "zero2"):
        optimizer = OSS.wrap(optimizer)
    if sharding == "zero2":
        return ShardedDataParallel(module, optimizer), optimizer
    if alone:
        return module, optimizer
    return DistributedDataParallel(module, find_unused_parameters=unused), optimizer


def _own_loop(case: Case, number: int, taken: int, folder: str) -> _Result:
    leg = case.legs[number]
    rank = dist.get_rank() if leg.workers > 1 else 0
    module, optimizer, schedule = _built(case, leg)
    _freeze(case, module, taken)
    make_quiet(case, module, taken)
    if case.hooked is not None and case.hooked < taken:
        _hook(module)
    scaler: torch.amp.GradScaler | None = None
    if case.precision == "fp16":
        sharded = leg.workers > 1 and leg.sharding == "zero2"
        scaler = (
            ShardedGradScaler(device="cpu") if sharded else torch.amp.GradScaler("cpu")
        )
    assert leg.per_worker is not None
    passes, factor = leg.passes, math.prod(by for at, by in case.rescaled if at < taken)
    for at, count in case.changes:
        passes = count if at <= taken else passes
    unused = case.net == "branch" or bool(case.frozen)
    tau_schedule: TauSchedule | None = None
    model: nn.Module
    ada: AdaScaleOptimizer
    if case.client == "attach":
        model, ada, tau_schedule = _attached(
            case, leg, passes, module, optimizer, schedule, scaler
        )
        schedule = None  # which the attached one drives
    else:
        precondition = None
        if case.rule == "adamscale":
            precondition = adam_preconditioner(optimizer)
        model = module
        alone = leg.workers == 1 and (case.rule == "adamscale" or case.added)
        if not alone:
            model, optimizer = _wrapped(module, optimizer, leg.sharding, unused)
        ada = _bare(case, leg, passes, module, optimizer, precondition, scaler)
    path = Path(folder, f"leg{number - 1}.pt")
    position, calls = case.starting * leg.base, 0
    options = StateDictOptions(full_state_dict=True)
    if number:
        saved = torch.load(path, weights_only=True)
        if case.via == "dcp":
            set_model_state_dict(module, saved["model"], options=options)
            set_optimizer_state_dict(module, ada, saved["optimizer"], options=options)
        else:
            module.load_state_dict(saved["model"])
            ada.load_state_dict(saved["optimizer"])
        if scaler is not None:
            scaler.load_state_dict(saved["scaler"])
        position = saved["position"]
        if tau_schedule is not None:
            tau_schedule.load_state_dict(saved["scheduler"])
        elif schedule is not None:
            schedule.load_state_dict(saved["scheduler"])
            calls = saved["calls"]
    watch = _Watch(ada)
    data = dataset(case)
    rows: list[Row] = []
    changes, short = dict(case.changes), dict(case.short)
    if factor != 1:
        assert isinstance(ada, AdaScale)
        ada.set_scale(factor * leg.workers * passes * leg.per_worker / leg.base)
    if case.unhooked is not None and case.unhooked < taken:
        ada.unhook()

    def announce(now: int, full: StepPlan) -> None:
        """Tell AdaScale of the passes of the next step, which has fewer than others."""
        scale = None if case.told == 1 else case.told * full.scale * now / full.passes
        divisor = passes if case.divided else None
        if case.ends:
            plan = full.shortened(now, scale, divisor)
            ada.step_end = lambda made: plan if made == now else None
        else:
            ada.expect_passes(now, scale=scale, loss_divided_by=divisor)

    def make_passes(
        step: int,
        now: int,
        full: StepPlan,
        batches: list[list[int]],
        fails: tuple[int, int] | None,
    ) -> None:
        divisor = passes if case.divided else now
        if now != passes:
            announce(now, full)
        weights: list[float] = []
        if case.units:
            units = [[sum(map(units_of, part)) for part in own] for own in seen]
            weights = [own / sum(map(sum, units)) for own in units[rank]]
            ada.sample_weights = weights
        for i, indices in enumerate(batches):
            x, tokens, y, index = data[indices]
            with torch.autocast("cpu", dtype=torch.float16, enabled=scaler is not None):
                loss = loss_of(case, model, x, tokens, y, index)
            if case.units:
                loss = loss * (leg.workers * now * weights[i])
            loss = _poisoned(
                case, step, i == 0, loss / divisor if case.scaled_loss else loss
            )
            if scaler is not None:
                loss = scaler.scale(loss)
            with _fails(module, fails == (step, i)):
                if i + 1 < now and isinstance(
                    model, DistributedDataParallel | ShardedDataParallel
                ):
                    with model.no_sync():
                        loss.backward()
                else:
                    if leg.sharding == "fsdp2" and leg.workers > 1:
                        model.set_requires_gradient_sync(i + 1 == now)
                    loss.backward()

    while ada.effective_steps < leg.total and len(rows) != leg.steps:
        step = taken + len(rows)
        if step in changes or step in dict(case.rescaled):
            passes, factor = (
                changes.get(step, passes),
                factor * dict(case.rescaled).get(step, 1),
            )
            if tau_schedule is not None:
                follow_batch(
                    tau_schedule, passes=passes, per_worker_batch_size=leg.per_worker
                )
            else:
                assert isinstance(ada, AdaScale)
                _change_plan(case, leg, ada, passes, factor)
        if step == case.unhooked:
            ada.unhook()
        if step == case.added:
            _freeze(case, module, step)
            ada.add_param_group(added_group(case, module))
        now = short.get(step, passes)
        seen, position = examples_of(
            case, position, leg.workers * now * leg.per_worker, leg.workers, now
        )
        _freeze(case, module, step)
        if step == case.quiet:
            make_quiet(case, module, step)
        _look(case, module, step)
        if step == case.hooked:
            _hook(module)
        full = ada.plan  # before a first try makes it shorter
        try:
            make_passes(step, now, full, seen[rank], case.caught)
        except _PlantedError:
            # A pass that has failed before any gradient was accumulated has not begun
            # for AdaScale, which has to be told.
            begun = ada.current.step.passing
            (module if begun else ada).zero_grad()  # AdaScale does not see the module's
            make_passes(step, now, full, seen[rank], None)
        if not case.scaled_loss:
            assert isinstance(ada, AdaScale)
            ada.current.ensure_summed(scaled=True)
            ada.scale_grad_by_num_grads_to_accum()
        if case.clip is not None:
            if scaler is not None:
                scaler.unscale_(ada)
            ada.clip_grad_norm(case.clip)
        expected, before = ada.gain(), ada.steps
        if step in case.left_out:
            ada.skip_step()
        elif scaler is not None:
            scaler.step(ada)
            scaler.update()
        else:
            ada.step()
        ada.zero_grad()
        ada.step_end = None
        skipped = ada.steps == before
        # a step on the device has its own formula; without hooks nobody knows of passes
        same = math.isclose(ada.last_step.gain, expected, rel_tol=1e-12)
        unseen = case.unhooked is not None and step >= case.unhooked
        assert skipped or unseen or same, "gain() before step() is another one"
        rows.append(_row(ada, watch.lrs, seen[rank], skipped=skipped))
        while schedule is not None and calls < calls_at(case, leg, ada.effective_steps):
            schedule.step()
            calls += 1
        if tau_schedule is not None and step % 2:  # it does not matter when
            tau_schedule.step()
    if number + 1 < len(case.legs):
        saved_schedule: Any = schedule if tau_schedule is None else tau_schedule
        state = {
            "position": position,
            "scheduler": {} if saved_schedule is None else saved_schedule.state_dict(),
            "calls": calls,
            "scaler": {} if scaler is None else scaler.state_dict(),
        }
        if isinstance(optimizer, OSS):
            optimizer.consolidate_state_dict(0 if case.via == "state_dict" else -1)
        if case.via == "dcp":
            state["model"] = get_model_state_dict(module, options=options)
            state["optimizer"] = get_optimizer_state_dict(module, ada, options=options)
        elif rank == 0:
            state["model"], state["optimizer"] = module.state_dict(), ada.state_dict()
        if rank == 0:
            torch.save(state, Path(folder, f"leg{number}.pt"))
        if leg.workers > 1:
            dist.barrier()
    return rows, _weights(module), _buffers(module)


def _attached(
    case: Case,
    leg: Leg,
    passes: int,
    module: nn.Module,
    optimizer: Optimizer,
    schedule: Any,
    scaler: torch.amp.GradScaler | None,
) -> tuple[nn.Module, AdaScaleOptimizer, TauSchedule]:
    """Attach to a loop that wraps the model in DDP, before or after."""
    config = AdaScaleConfig(
        **_schedule_of_base(case, leg, schedule),
        per_worker_batch_size=leg.per_worker,
        accumulation=passes,
        rule=_rule(case),
        precision=case.precision,  # type: ignore[arg-type]
        grad_clip=case.clip,
        averaging_window=case.window,
        measure_every=case.measure_every,
        dataset_length=case.length,
    )
    model = module
    unused = case.net == "branch" or bool(case.frozen)
    if case.seed % 2:
        model, optimizer = _wrapped(module, optimizer, "none", unused)
    ada, tau_schedule = attach(
        model,
        optimizer,
        schedule,
        config,
        _recipe(case, leg),
        grad_scaler=scaler,
        starting_step=case.starting,
    )
    if model is module:
        model, _ = _wrapped(module, optimizer, "none", unused)
    return model, ada, tau_schedule


def _bare(
    case: Case,
    leg: Leg,
    passes: int,
    module: nn.Module,
    optimizer: Optimizer,
    precondition: Any,
    scaler: torch.amp.GradScaler | None,
) -> AdaScale:
    assert leg.per_worker is not None
    more: dict[str, Any] = {"grad_scaler": scaler}
    if case.effective:
        more |= {"averaging_window": case.window, "measure_every": case.measure_every}
    elif case.smoothed_by_scale:
        more["smoothing"] = lambda plan: 0.9**plan.scale
    elif case.smoothing is not None:
        more["smoothing"] = case.smoothing
    return AdaScale(
        optimizer,
        world_size=leg.workers,
        batch_size=leg.workers * passes * leg.per_worker,
        num_gradients_to_accumulate=passes,
        is_scaled_loss=case.scaled_loss,
        debias_ewma=case.debias,
        variance_floor=case.floor,
        clip="samples" if case.clip_samples else "averages",
        total_steps=leg.total,
        single_gain=case.single_gain,
        base_batch_size=leg.base,
        rule=make_rule(_rule(case)),
        precondition=precondition,
        model=module,
        **more,
    )


def _change_plan(
    case: Case, leg: Leg, ada: AdaScale, passes: int, factor: float
) -> None:
    """Set passes and S in one call: in two, another shape would be declared in between,
    such as one pass at S = 1, which measures nothing.
    """
    assert leg.per_worker is not None
    scale = factor * leg.workers * passes * leg.per_worker / leg.base
    ada.set_plan(StepPlan(workers=leg.workers, passes=passes, given_scale=scale))
    ada.set_num_gradients_to_accumulate(passes, update_smoothing=_counts(case))


def _counts(case: Case) -> bool:
    """Whether θ follows from the number of samples."""
    return case.smoothing is None and not case.effective and not case.smoothed_by_scale
