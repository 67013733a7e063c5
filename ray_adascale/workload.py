"""A workload: one function from a config to everything that training needs.

Search, training, forecast and command line call the same function, at the base batch and at scale, so the model, the
data and the schedule cannot drift apart between them.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from .config import AdaScaleConfig
from .recipe import Recipe

__all__ = [
    "ConfigAccessLog",
    "Workload",
    "WorkloadFn",
    "build",
    "injected_settings",
    "resolve",
    "torchs_own_hint",
    "unread_warning",
    "with_unit",
]

HANDED = ("base_batch_size", "total_steps")
"""The fields of ``AdaScaleConfig`` that a workload's function may ask its config for."""


class ConfigAccessLog:
    """What a workload's function has read of its config, up to now: it may keep the config, and read later.

    Args:
        given: The keys that it was given.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = tuple(given)
        self._asked: dict[
            Any, None
        ] = {}  # in the order in which they were first asked for, whether they were there or not
        self._all = False

    def key(self, key: Any) -> None:
        """It has asked for this key."""
        self._asked[key] = None

    def everything(self) -> None:
        """It has taken all there is, as ``Settings(**config)`` does, and nobody can tell what for."""
        self._all = True

    @property
    def unread(self) -> dict[str, str | None]:
        """The keys that it was given and has not asked for; each with the nearest name that it has asked for, if one is near."""
        if self._all:
            return {}
        asked = [key for key in self._asked if isinstance(key, str)]
        near = {key: difflib.get_close_matches(str(key), asked, n=1) for key in self._given if key not in self._asked}
        return {key: found[0] if found else None for key, found in near.items()}


def unread_warning(unread: Mapping[str, str | None]) -> str:
    """A sentence about hyperparameters that nobody reads, see :attr:`ConfigAccessLog.unread`."""
    names = ", ".join(repr(key) + (f" (is {near!r} meant?)" if near else "") for key, near in unread.items())
    them = "it" if len(unread) == 1 else "them"
    return f"The workload has not read {names} of its config, so that changes nothing. Correct the name, or leave {them} out."


class _Config(dict[str, Any]):
    """The config that a workload's function gets: a dict that notes what is read of it, and knows T and B0 if asked for them.

    These two are not among its keys, so that ``Settings(**config)`` gets what was given and no more.
    """

    def __init__(self, given: Mapping[str, Any], known: Mapping[str, Any], reads: ConfigAccessLog) -> None:
        super().__init__(given)
        self._known = {key: value for key, value in known.items() if key not in given}
        self._reads = reads

    def __getitem__(self, key: str) -> Any:
        self._reads.key(key)
        return super().__getitem__(key)

    def __missing__(self, key: str) -> Any:
        return self._known[key]

    def __contains__(self, key: object) -> bool:
        self._reads.key(key)
        return super().__contains__(key) or key in self._known

    def get(self, key: str, default: Any = None) -> Any:
        self._reads.key(key)
        return super().get(key, self._known.get(key, default))

    def pop(self, key: str, *default: Any) -> Any:
        self._reads.key(key)
        if not super().__contains__(key) and key in self._known:
            return self._known.pop(key)
        return super().pop(key, *default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        self._reads.key(key)
        return super().setdefault(key, self._known.get(key, default))

    def __delitem__(self, key: str) -> None:
        self._reads.key(key)
        super().__delitem__(key)

    # Whatever goes through all of it ends in one of these: ** and dict() in keys(), json in items().

    def __iter__(self) -> Iterator[str]:
        self._reads.everything()
        return super().__iter__()

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        self._reads.everything()
        return super().keys()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        self._reads.everything()
        return super().values()

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        self._reads.everything()
        return super().items()

    def popitem(self) -> tuple[str, Any]:
        self._reads.everything()
        return super().popitem()

    def __or__(self, other: Any) -> Any:
        self._reads.everything()
        return super().__or__(other)

    def __ror__(self, other: Any) -> Any:
        self._reads.everything()
        return super().__ror__(other)

    # A copy of it is read as it is.

    def copy(self) -> _Config:
        return self._like(dict.items(self))

    def __copy__(self) -> _Config:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Config:
        return self._like((key, copy.deepcopy(value, memo)) for key, value in dict.items(self))

    def _like(self, pairs: Any) -> _Config:
        return _Config(dict(pairs), self._known, self._reads)

    def __reduce__(self) -> Any:  # in another process nobody looks: there it is a plain dict, with T and B0
        self._reads.everything()
        return dict, ({**self._known, **dict(dict.items(self))},)


@dataclass(kw_only=True, eq=False)
class Workload:
    """What to train, in plain torch, exactly as at the base batch. Not wrapped, not moved to a device.

    Attributes:
        model: The bare model.
        optimizer: One optimizer over (some of) the model's parameters, its learning rates those of the base batch.
        scheduler: The learning-rate schedule, bound to ``optimizer``, or None for constant rates. Never step it.
        scheduler_unit: What one ``scheduler.step()`` meant in the base run: an optimizer ``"step"`` or an ``"epoch"``.
            Required with a scheduler.
        train_dataset: Examples, map-style (``__len__`` and ``__getitem__``) where a resume has to be exact.
        loss_fn: ``loss_fn(model, batch)`` is the mean loss over the batch's examples, a scalar tensor.
        evaluate: ``evaluate(model)`` returns metrics by name; called without gradients, in eval mode.
        metric: What a search optimises: ``"loss"`` (the training loss) or a key of what ``evaluate`` returns.
        mode: Whether ``metric`` is to be small (``"min"``) or large (``"max"``).
        collate_fn: Makes a batch of a list of examples, as in ``torch.utils.data.DataLoader``; torch's by default.
        extra_state: What else belongs into checkpoints, by name, such as an average of the weights; see
            :class:`ray_adascale.Run`.
        after_step: ``after_step(model)``, called after each optimizer step; see :class:`ray_adascale.Run`.
        config_reads: What the function has read of its config; whoever calls the function sets it, so that a run can warn of
            hyperparameters that nobody reads.

    Raises:
        ValueError: A field that can't work, naming it and what to do.
    """

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None = None
    scheduler_unit: Literal["step", "epoch"] | None = None
    train_dataset: Any
    loss_fn: Callable[[nn.Module, Any], Tensor]
    evaluate: Callable[[nn.Module], dict[str, float]] | None = None
    metric: str = "loss"
    mode: Literal["min", "max"] = "min"
    collate_fn: Callable[[list[Any]], Any] | None = None
    extra_state: Mapping[str, Any] | None = None
    after_step: Callable[[nn.Module], object] | None = None
    config_reads: ConfigAccessLog | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise ValueError(f"Invalid model: {_kind(self.model)}. Must be a torch.nn.Module.")
        self._check_optimizer()
        self._check_scheduler()
        if _length(self.train_dataset) == 0:
            raise ValueError("Invalid train_dataset: it is empty. Must hold at least one example.")
        for name in ("loss_fn", "evaluate", "collate_fn", "after_step"):
            value = getattr(self, name)
            if not callable(value) and (value is not None or name == "loss_fn"):
                raise ValueError(f"Invalid {name}: {_kind(value)}. Must be a function.")
        if not isinstance(self.metric, str) or not self.metric:
            raise ValueError(f"Invalid metric={self.metric!r}. Must be 'loss' or a key of what evaluate returns.")
        if self.metric != "loss" and self.evaluate is None:
            raise ValueError(
                f"Invalid metric={self.metric!r} without evaluate. Pass evaluate=, a function from the model to a dict "
                "with that key, or use metric='loss'."
            )
        if self.mode not in ("min", "max"):
            raise ValueError(f"Invalid mode={self.mode!r}. Must be 'min' or 'max'.")

    def _check_optimizer(self) -> None:
        if isinstance(self.optimizer, list | tuple | dict):
            raise ValueError(
                f"Invalid optimizer: {type(self.optimizer).__name__} of {len(self.optimizer)}. Only one is supported: "
                "there is one gain and one clock of effective steps, which several optimizers would advance several "
                "times. Make one optimizer with several parameter groups."
            )
        if not isinstance(self.optimizer, Optimizer):
            raise ValueError(f"Invalid optimizer: {_kind(self.optimizer)}. Must be a torch.optim.Optimizer.")
        known = {id(p) for p in self.model.parameters()}
        for g, group in enumerate(self.optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                if id(p) not in known:
                    raise ValueError(
                        f"Invalid optimizer: parameter {i} of group {g}, of shape {tuple(p.shape)}, is not one of the "
                        "model's. Build the optimizer from model.parameters() of this very model, after any change to "
                        "its layers; a loss with weights of its own belongs into the model."
                    )

    def _check_scheduler(self) -> None:
        if self.scheduler_unit not in (None, "step", "epoch"):
            raise ValueError(f"Invalid scheduler_unit={self.scheduler_unit!r}. Must be 'step' or 'epoch'.")
        if self.scheduler is None:
            return
        if isinstance(self.scheduler, ReduceLROnPlateau):
            raise ValueError(
                "Invalid scheduler: ReduceLROnPlateau. Its learning rates depend on the run, so there is no schedule "
                "to carry to another batch size. Use one that depends on the step alone."
            )
        if not isinstance(self.scheduler, LRScheduler):
            raise ValueError(
                f"Invalid scheduler: {_kind(self.scheduler)}. Must be a torch.optim.lr_scheduler.LRScheduler; combine "
                f"several with SequentialLR or ChainedScheduler.{torchs_own_hint(self.scheduler)}"
            )
        if self.scheduler.optimizer is not self.optimizer:
            raise ValueError(
                "Invalid scheduler: it drives another optimizer than the workload's. Pass this optimizer to it."
            )
        if self.scheduler_unit is None:
            raise ValueError(
                "Missing scheduler_unit. Say what one scheduler.step() meant in the base run: 'step' if it was called "
                "after every optimizer step, 'epoch' if once an epoch. The scheduler doesn't tell, and a wrong guess "
                "is silently wrong: the learning rate would fall hundreds of times too fast or too slowly."
            )


def torchs_own_hint(scheduler: object) -> str:
    """What to do about a scheduler that is none of torch's kind, as a further sentence; empty where nothing is known of it."""
    if type(scheduler).__module__.partition(".")[0] != "timm":
        return ""
    return (
        " timm's schedulers are stepped with a number that the loop counts, so τ can't drive them. Use torch's own: a warm-up "
        "and a cosine are SequentialLR(optimizer, [LinearLR(optimizer, start_factor, total_iters=w), "
        "CosineAnnealingLR(optimizer, T_max=T - w)], milestones=[w])."
    )


WorkloadFn: TypeAlias = Callable[[dict[str, Any]], Workload]


def with_unit(config: AdaScaleConfig, workload: Workload) -> AdaScaleConfig:
    """The settings with the workload's scheduler unit (None without a scheduler, where there is nothing to count), and its
    metric for an early stop that names none.
    """
    unit = workload.scheduler_unit if workload.scheduler is not None else None
    if config.scheduler_unit is not None and config.scheduler_unit != unit:
        raise ValueError(
            f"Invalid AdaScaleConfig(scheduler_unit={config.scheduler_unit!r}): the workload says {unit!r}. Leave it out."
        )
    stop = config.early_stop
    if stop is not None and stop.metric is None:
        stop = replace(stop, metric=workload.metric, mode=workload.mode)
    return replace(config, scheduler_unit=unit, early_stop=stop)


def injected_settings(settings: AdaScaleConfig | None, recipe: Recipe | None = None) -> dict[str, int]:
    """What a workload's function is told beside its hyperparameters: T (``total_steps``) and B0 (``base_batch_size``).

    As far as they are known: with ``total_epochs`` T is not. With a recipe, what its search has told the function, so that
    the function builds the same schedule again.
    """
    names = HANDED if recipe is None else [name for name in HANDED if name in recipe.search.get("handed", [])]
    return {name: value for name in names if (value := getattr(settings, name, None)) is not None}


def build(
    workload_fn: WorkloadFn,
    hyperparameters: Mapping[str, Any],
    settings: AdaScaleConfig | None = None,
    recipe: Recipe | None = None,
) -> Workload:
    """``workload_fn(config)``, checked. The function gets a copy of the hyperparameters as its config, and may change it.

    Where the hyperparameters don't say otherwise, ``config["total_steps"]`` and ``config["base_batch_size"]`` are T and B0, see
    :func:`injected_settings`: a schedule need not be told its length a second time. They are no hyperparameters: they are not
    among the config's keys, and nobody has to read them.

    Args:
        workload_fn: What builds the workload.
        hyperparameters: What it is given.
        settings: Of the run that the workload is for.
        recipe: Of that run, if there is one.

    Raises:
        TypeError: It returned something other than a :class:`Workload`.
    """
    reads = ConfigAccessLog(hyperparameters)
    known = injected_settings(settings, recipe)
    workload = workload_fn(_Config(copy.deepcopy(dict(hyperparameters)), known, reads))
    if not isinstance(workload, Workload):
        name = getattr(workload_fn, "__qualname__", repr(workload_fn))
        hint = " Is a return statement missing?" if workload is None else ""
        raise TypeError(f"{name} returned {_kind(workload)}. Must return a ray_adascale.Workload.{hint}")
    workload.config_reads = reads
    return workload


def resolve(spec: str, what: str = "workload") -> Any:
    """The object that a command line names.

    A file is imported as ``python file.py`` would find it: its folder goes to the front of ``sys.path``, so that it can
    import its neighbours, and its module has the file's name. Functions then pickle by reference, and other processes
    with that folder on their path find them. Where the name is taken by another module (``json.py``), the file is
    loaded under a name of its own that is not left in ``sys.modules``: cloudpickle then sends functions by value.

    Args:
        spec: ``"path/to/file.py:name"`` or ``"package.module:name"``; the name may have dots.
        what: What errors call it.

    Raises:
        ValueError: The spec is malformed, there is no such file, module or name, or its import failed (the cause is
            attached, with its traceback).
    """
    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name:
        raise ValueError(f"Invalid {what} {spec!r}. Must be 'path/to/file.py:name' or 'package.module:name'.")
    if where.endswith(".py"):
        module = _load_file(Path(where), spec, what)
    else:
        module = _import(where, spec, what)
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise ValueError(
                f"Invalid {what} {spec!r}: there is no {name!r} in {where}. {_contents(module)}"
            ) from error
    return found


_loaded: dict[Path, ModuleType] = {}  # files whose name is taken, so that resolving twice gives the same objects


def _load_file(path: Path, spec: str, what: str) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"Invalid {what} {spec!r}: there is no file {path}.")
    if path in _loaded:
        return _loaded[path]
    folder = str(path.parent)
    taken = not path.stem.isidentifier() or not _would_find(path.stem, path)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    importlib.invalidate_caches()  # the file may be younger than the finder's listing of its folder
    if not taken and _would_find(path.stem, path, folder_on_path=True):
        return _import(path.stem, spec, what)

    name = f"_workload_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses look their module up while it is being executed
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a script's argument parser exits, for one
        raise _import_failed(spec, what, error) from error
    finally:
        del sys.modules[name]
    _loaded[path] = module
    return module


def _would_find(stem: str, path: Path, *, folder_on_path: bool = False) -> bool:
    """Whether ``import stem`` means this file; without its folder on the path, whether nothing else is meant."""
    if stem in sys.modules:
        origin = getattr(sys.modules[stem], "__file__", None)
        return origin is not None and Path(origin).resolve() == path
    found = importlib.util.find_spec(stem)
    if found is None:
        return not folder_on_path
    return found.origin is not None and Path(found.origin).resolve() == path


def _import(name: str, spec: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        # "No module named 'a'" when importing a.b means that the user's own name is wrong; any other name is an import
        # inside the user's code.
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise ValueError(
                f"Invalid {what} {spec!r}: there is no module {error.name!r}. For a file, write path/to/file.py:name."
            ) from error
        raise _import_failed(spec, what, error) from error


def _import_failed(spec: str, what: str, error: BaseException) -> ValueError:
    hint = " Does it run as a script without `if __name__ == '__main__'`?" if isinstance(error, SystemExit) else ""
    told = f"{type(error).__name__}: {error}".removesuffix(".")
    return ValueError(f"Invalid {what} {spec!r}: importing it failed with {told}.{hint}")


def _contents(module: ModuleType) -> str:
    public = {k: v for k, v in vars(module).items() if not k.startswith("_") and not isinstance(v, ModuleType)}
    own = sorted(k for k, v in public.items() if callable(v) and getattr(v, "__module__", None) == module.__name__)
    other = sorted(set(public) - set(own))
    parts = [f"{what}: {', '.join(names)}." for what, names in (("Functions", own), ("Other names", other)) if names]
    return " ".join(parts) or "The module defines no names."


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError, AttributeError):  # iterable-style, or Ray Data's, which refuses
        return None


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__module__}.{type(value).__qualname__}"
