"""A workload: one function from a config to everything that training needs.

Search, training, forecast and command line call the same function, at the base batch
and at scale. So they all have the same model, data and schedule.
"""

from __future__ import annotations

import copy
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import default_collate

from ._errors import SettingError, kind_of, noted
from ._fields import (
    MAYBE_FUNCTION,
    by,
    check_fields,
    hinting,
    integer,
    must_be,
    refuse_credentials,
)
from ._torch import leaves
from ._warn import warn_at_user
from .checkpoint.rng import seed_everything
from .config import AdaScaleConfig
from .data.iterables import own_sampler
from .data.sampling import ExampleSampler
from .optim.scheduler_checks import check_initial_rates, check_scheduler
from .optim.wrapper import check_parameters, check_wrappable
from .recipe import Recipe

INJECTED = ("base_batch_size", "total_steps")
"""The fields of ``AdaScaleConfig`` that a workload's function may read from its
config.
"""


class ConfigAccessLog:
    """The keys that a workload's function reads of its config, while it builds the
    workload and later.

    Args:
        given: The config's keys.

    Attributes:
        read: The keys that were read, whether the config has them or not, in the order
            of the first reads.
    """

    def __init__(self, given: Iterable[str]) -> None:
        self._given = tuple(given)
        self.read: dict[Any, None] = {}

    @property
    def unread(self) -> dict[str, str | None]:
        """The given keys that were not read, each with a similar key that was read,
        if there is one.
        """
        read = [key for key in self.read if isinstance(key, str)]
        similar = {
            key: difflib.get_close_matches(str(key), read, n=1)
            for key in self._given
            if key not in self.read
        }
        return {key: found[0] if found else None for key, found in similar.items()}


def unread_warning(unread: Mapping[str, str | None]) -> str:
    """Return a warning about hyperparameters that are never read, see
    :attr:`ConfigAccessLog.unread`.
    """
    names = ", ".join(
        repr(key) + (f" (is {near!r} meant?)" if near else "")
        for key, near in unread.items()
    )
    them = "it" if len(unread) == 1 else "them"
    return (
        f"The workload has not read {names} of its config, so that changes nothing. "
        f"Correct the name, or leave {them} out."
    )


_NO_T = (
    "With total_epochs T is not known yet. Give total_steps (--total-steps), or read "
    "config.get('total_steps', 9)."
)


class _Config(dict[str, Any]):
    """The config of a workload's function: a dict that logs the keys that are read, and
    answers for T and B0 as well.

    T and B0 are not among the keys, so ``Settings(**config)`` gets the given
    hyperparameters alone.
    """

    def __init__(
        self,
        given: Mapping[str, Any],
        injected: Mapping[str, Any],
        log: ConfigAccessLog,
    ) -> None:
        super().__init__(given)
        self._injected = {
            key: value for key, value in injected.items() if key not in given
        }
        self._log = log

    def __getitem__(self, key: str) -> Any:
        self._log.read[key] = None
        return super().__getitem__(key)

    def __missing__(self, key: str) -> Any:
        with noted(
            lambda: (
                _NO_T
                if key == "total_steps"
                else f"A hyperparameter that is missing: {key}=VALUE."
            )
        ):
            return self._injected[key]

    # dict's own methods read the values without __getitem__, and so do ** and dict()
    # with dict's own iterator.
    __contains__ = Mapping.__contains__
    get = Mapping.get  # type: ignore[assignment]
    items = Mapping.items  # type: ignore[assignment]
    values = Mapping.values  # type: ignore[assignment]
    setdefault = MutableMapping.setdefault

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()

    def pop(self, key: str, *default: Any) -> Any:
        if key not in self and default:
            return default[0]
        value = self[key]
        (self if super().__contains__(key) else self._injected).__delitem__(key)
        return value

    def copy(self) -> _Config:
        return _Config(dict(super().items()), self._injected, self._log)

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> _Config:
        return _Config(
            copy.deepcopy(dict(super().items()), memo), self._injected, self._log
        )


_METRIC = must_be(
    "'loss' or a key of the dict that evaluate returns",
    lambda value: isinstance(value, str) and value != "",
)


@dataclass(kw_only=True, eq=False)
class RunInputs:
    """The pieces that every run has, checked. The attributes are those of
    :class:`Workload`.

    Raises:
        ValueError: A piece can't work. The message names it, with what to do.
    """

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None = None
    train_dataset: Any
    sampler: ExampleSampler | None = None
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None = field(
        default=None, metadata=MAYBE_FUNCTION
    )
    collate_fn: Callable[[list[Any]], Any] | None = field(
        default=None, metadata=MAYBE_FUNCTION
    )
    extra_state: Mapping[str, Any] | None = None
    after_step: Callable[..., object] | None = field(
        default=None, metadata=MAYBE_FUNCTION
    )
    weight_of: Callable[[Any], Any] | None = field(
        default=None, metadata=MAYBE_FUNCTION
    )
    starting_step: int = field(default=0, metadata=by(integer(0)))

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise ValueError(
                f"Invalid model: {kind_of(self.model)}. Must be a torch.nn.Module."
            )
        check_wrappable(self.optimizer)
        check_parameters(self.model, self.optimizer, alone=True)
        check_fields(self)
        if self.scheduler is not None:
            check_scheduler(self.optimizer, self.scheduler)
            if self.starting_step:
                check_initial_rates(self.optimizer, self.scheduler)
        if (
            self.sampler is None
            and (theirs := own_sampler(self.train_dataset)) is not None
        ):
            loader = self.train_dataset
            self.sampler = theirs
            self.train_dataset = loader.dataset
            if self.collate_fn is None and loader.collate_fn is not default_collate:
                self.collate_fn = loader.collate_fn
            warn_at_user(
                f"The data are a DataLoader with a {type(theirs).__name__}. Its "
                "dataset, sampler and collate_fn are used, and the run makes the "
                "batches: per_worker_batch_size, num_loader_workers and drop_last of "
                "AdaScaleConfig count, not the loader's. Without this warning: give "
                "loader.dataset, and sampler=loader.sampler."
            )
        if _length(self.train_dataset) == 0:
            raise ValueError(
                "Invalid train_dataset: it is empty. Must hold at least one example."
            )


@hinting
@dataclass(kw_only=True, eq=False)
class Workload(RunInputs):
    """The pieces of a training run, in plain torch, exactly as at the base batch. Not
    wrapped, not moved to a device.

    Attributes:
        model: The bare model.
        optimizer: One optimizer over the model's trainable parameters, with the
            learning rates of the base batch.
        scheduler: The learning-rate schedule, bound to ``optimizer``, or None for
            constant rates. Never step it.
        scheduler_unit: What one ``scheduler.step()`` meant in the base run: an
            optimizer ``"step"`` or an ``"epoch"``. Required with a scheduler.
        train_dataset: Examples, map-style (``__len__`` and ``__getitem__``) for exact
            resumes.
        sampler: Draws the examples of each epoch: a torch ``Sampler``, such as
            ``WeightedRandomSampler``, or a function from the epoch, from 0, to indices.
            One for all workers, with the same number of indices each epoch, which T
            counts. It is seeded by (seed, epoch), so runs resume exactly. Default: a
            permutation, or the dataset's order (``shuffle``).
        loss_fn: ``loss_fn(model, batch)`` is the mean loss over the batch's examples, a
            scalar tensor.
        evaluate: ``evaluate(model)`` returns metrics by name; called without gradients,
            in eval mode.
        metric: The metric that a search optimises: ``"loss"`` (the training loss) or a
            key of the dict from ``evaluate``.
        mode: Whether a small (``"min"``) or a large (``"max"``) metric is better.
            Required, unless the metric is ``"loss"``: of that a small one is better.
        collate_fn: Makes a batch of a list of examples, as in
            ``torch.utils.data.DataLoader``; torch's by default.
        extra_state: Further objects for the checkpoints, by name, such as an average of
            the weights; see :class:`ray_adascale.Run`.
        after_step: ``after_step(model)`` or ``after_step(model, gain)``, called after
            each optimizer step; see :class:`ray_adascale.Run`.
        weight_of: ``weight_of(batch)`` is the number of units, such as tokens, over
            which the loss is a mean; see :class:`ray_adascale.Run`.
        starting_step: τ at which the run begins, if another program has trained the
            weights up to there; see :class:`ray_adascale.Run`.
        config_reads: The keys of the config that the function has read. ``build`` sets
            it, so that a run can warn about hyperparameters that are never read.
        seeds_itself: Whether the function has set torch's seed to another one than the
            run's. ``build_seeded`` sets it.

    Raises:
        ValueError: A field can't work. The message names it, with what to do.
    """

    scheduler_unit: Literal["step", "epoch"] | None = None
    loss_fn: Callable[[nn.Module, Any], Tensor] = field(
        metadata=by(must_be("a function", callable))
    )
    metric: str = field(default="loss", metadata=by(_METRIC))
    mode: Literal["min", "max"] | None = None
    config_reads: ConfigAccessLog | None = field(default=None, repr=False)
    seeds_itself: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scheduler is not None and self.scheduler_unit is None:
            raise ValueError(
                "Missing scheduler_unit. It is what one scheduler.step() meant in the "
                "base run: 'step' if it was called after every optimizer step, 'epoch' "
                "if once an epoch. A wrong guess would be silently wrong: the learning "
                "rate would fall hundreds of times too fast or too slowly."
            )
        if self.metric != "loss" and self.evaluate is None:
            raise ValueError(
                f"Invalid metric={self.metric!r} without evaluate. Pass evaluate=, a "
                "function from the model to a dict with that key, or use metric='loss'."
            )
        if self.metric != "loss" and self.mode is None:
            raise ValueError(
                f"Missing mode for metric={self.metric!r}. Write mode='max' if a large "
                "one is better, as of an accuracy, or mode='min' if a small one is. A "
                "wrong guess would select the worst trial."
            )
        if self.metric == "loss" and self.mode == "max":
            raise ValueError(
                "Invalid mode='max' with metric='loss': the largest loss would be the "
                "best. Name the key of evaluate's dict that counts, as in "
                "metric='accuracy', or leave mode out."
            )

    @property
    def better(self) -> Literal["min", "max"]:
        """The mode; "min" for the loss."""
        return "min" if self.mode is None else self.mode

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return ``loss_fn(model, batch)``. An exception gets a note on the batch,
        since torch's messages don't name it.
        """
        with noted(lambda: _loss_note(model, batch)):
            return self.loss_fn(model, batch)


WorkloadFn: TypeAlias = Callable[[dict[str, Any]], Workload]


def code_of(function: Any) -> Any:
    """Return what has the code of a function: the function within decorators, a
    ``functools.partial`` or a bound method; of an object that is called its class.
    """
    while True:
        inner = inspect.unwrap(function)
        if isinstance(inner, functools.partial):
            inner = inner.func
        inner = getattr(inner, "__func__", inner)
        if inner is function:
            break
        function = inner
    return function if hasattr(function, "__qualname__") else type(function)


def with_unit(config: AdaScaleConfig, workload: Workload) -> AdaScaleConfig:
    """Return the settings with the workload's scheduler unit, None without a scheduler.

    An early stop without a metric gets the workload's metric.
    """
    unit = workload.scheduler_unit if workload.scheduler is not None else None
    if config.scheduler_unit is not None and config.scheduler_unit != unit:
        raise SettingError(
            f"Invalid {{}}: the workload says {unit!r}. Leave it out.",
            scheduler_unit=config.scheduler_unit,
        )
    stop = config.early_stop
    if stop is not None and stop.metric is None:
        stop = replace(stop, metric=workload.metric, mode=workload.better)
    return replace(config, scheduler_unit=unit, early_stop=stop)


def injected_settings(
    settings: AdaScaleConfig | None, recipe: Recipe | None = None
) -> dict[str, int]:
    """Return the settings that a workload's function may read: T (``total_steps``) and
    B0 (``base_batch_size``).

    Unknown ones are missing: T is unknown with ``total_epochs``. With a recipe, the
    function gets the same settings as in the search, so that it builds the same
    schedule again.
    """
    names = (
        INJECTED
        if recipe is None
        else [name for name in INJECTED if name in recipe.search.get("handed", [])]
    )
    return {
        name: value
        for name in names
        if (value := getattr(settings, name, None)) is not None
    }


def build(
    workload_fn: WorkloadFn,
    hyperparameters: Mapping[str, Any],
    settings: AdaScaleConfig | None = None,
    recipe: Recipe | None = None,
) -> Workload:
    """Return ``workload_fn(config)``, checked. The config is a copy of the
    hyperparameters, and the function may change it.

    ``config["total_steps"]`` and ``config["base_batch_size"]`` are T and B0, unless the
    hyperparameters have these keys, see :func:`injected_settings`. So the length of a
    schedule is given once. T and B0 are not among the config's keys, and the function
    need not read them.

    Args:
        workload_fn: The workload's function.
        hyperparameters: Its config.
        settings: The run's settings.
        recipe: The run's recipe, if there is one.

    Raises:
        TypeError: The function returned no :class:`Workload`.
        ValueError: A hyperparameter has a URI with credentials.
    """
    refuse_credentials("hyperparameters", hyperparameters)
    reads = ConfigAccessLog(hyperparameters)
    known = injected_settings(settings, recipe)
    try:
        workload = workload_fn(
            _Config(copy.deepcopy(dict(hyperparameters)), known, reads)
        )
    except (TypeError, ValueError, ArithmeticError, AssertionError) as error:
        # lr=abc on the command line is text, and torch's message does not name the
        # hyperparameter.
        text = [
            f"{key}={value!r}"
            for key in reads.read
            if isinstance(value := hyperparameters.get(key), str)
        ]
        if text:
            verb = "is" if len(text) == 1 else "are"
            error.add_note(
                f"{', '.join(text)} {verb} text, where a number may be needed."
            )
        raise
    if not isinstance(workload, Workload):
        name = getattr(workload_fn, "__qualname__", repr(workload_fn))
        hint = " Is a return statement missing?" if workload is None else ""
        raise TypeError(
            f"{name} returned {kind_of(workload)}. Must return a "
            f"ray_adascale.Workload.{hint}"
        )
    workload.config_reads = reads
    return workload


SEEDS_ITSELF = (
    "The workload calls torch.manual_seed while it is built, so its first weights are "
    "the same with each AdaScaleConfig(seed=...): the scores of a search's repeats, "
    "and the forecast's interval, differ less than those of real seeds. Leave the call "
    "out: the seed is set before the workload is built."
)


def build_seeded(
    workload_fn: WorkloadFn,
    hyperparameters: Mapping[str, Any],
    config: AdaScaleConfig,
    recipe: Recipe | None = None,
) -> Workload:
    """Seed all generators and build the workload, see :func:`build`."""
    seed_everything(config.seed)
    workload = build(workload_fn, hyperparameters, config, recipe)
    workload.seeds_itself = torch.initial_seed() != config.seed
    return workload


def _loss_note(model: nn.Module, batch: Any) -> str:
    tensors = [part for part in leaves(batch) if isinstance(part, Tensor)][:6]
    dtypes = dict.fromkeys(
        str(p.dtype).removeprefix("torch.") for p in model.parameters()
    )
    return (
        "In loss_fn(model, batch), with "
        f"{', '.join(map(_in_words, tensors)) or 'no tensor'} in the batch and "
        f"parameters of {', '.join(dtypes) or 'no dtype'}. Compare dtypes and shapes "
        "with what the model takes, and labels with its classes."
    )


def _in_words(tensor: Tensor) -> str:
    text = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    if (
        tensor.is_floating_point()
        or tensor.is_complex()
        or not tensor.is_cpu
        or not tensor.numel()
    ):
        return text  # after an assertion on the device, nothing can be read from it
    return f"{text} from {tensor.min().item()} to {tensor.max().item()}"


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (
        TypeError,
        NotImplementedError,
        AttributeError,
    ):
        # An iterable, or Ray Data's, which raises.
        return None


def describe_config(config: Mapping[str, Any]) -> str:
    """Return hyperparameters on one line, for people."""
    parts = []
    for key, value in config.items():
        text = f"{value:.4g}" if isinstance(value, float) else repr(value)
        parts.append(f"{key}={text if len(text) <= 40 else text[:37] + '...'}")
    return ", ".join(parts) or "an empty config"
