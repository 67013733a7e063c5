"""The recipe: the frozen outcome of a search at the base batch, and its file.

The file is JSON that people can read, review and keep under version control. A digest
shows damage and edits: the run at scale must be the run that the search found.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

import numpy as np

from ._errors import RecipeError, SettingError, short
from ._fields import (
    COUNT,
    KEPT_SETTINGS,
    Check,
    by,
    check_fields,
    integer,
    json_object,
    must_be,
    number,
    optional,
    within,
)
from ._files import fetched, write_anywhere
from ._version import __version__
from .gain import plain_noise_scale, whole_number

FORMAT = "ray_adascale/recipe"
VERSION = 1


# --- Checks: each returns the value as plain Python, or raises an error that names the field


def _date(where: str, value: Any) -> str:
    text: str = _text(where, value)
    try:
        datetime.fromisoformat(text)
    except ValueError:
        raise RecipeError(
            f"Invalid {where}={text!r}. Must be an ISO 8601 date, as 2026-01-31."
        ) from None
    return text


def _texts(where: str, value: Any) -> dict[str, str]:
    return {
        key: _text(f"{where}.{key}", item)
        for key, item in json_object(where, value).items()
    }


def _settings(where: str, value: Any) -> dict[str, Any]:
    settings = json_object(where, value)
    for name in settings.keys() - KEPT_SETTINGS.keys():
        raise RecipeError(
            f"Invalid {where}.{name}. Must be one of {', '.join(KEPT_SETTINGS)}."
        )
    return {
        name: KEPT_SETTINGS[name](f"{where}.{name}", item)
        for name, item in settings.items()
    }


def _records(cls: Any, what: str) -> dict[str, Check]:
    """Return the check of a list of records. The items are objects of the class, or
    dicts with its fields, as in a file.
    """
    checks: dict[str, Check] = {
        each.name: each.metadata["check"] for each in dataclasses.fields(cls)
    }

    def check(where: str, value: Any) -> list[Any]:
        if not isinstance(value, list | tuple):
            raise RecipeError(
                f"Invalid {where}: {type(value).__name__}. Must be a list of {what}."
            )
        checked = []
        for i, item in enumerate(value):
            given = vars(item) if isinstance(item, cls) else item
            if not isinstance(given, dict) or given.keys() != checks.keys():
                raise RecipeError(
                    f"Invalid {where}[{i}]: {short(item)}. Must be a {cls.__name__} "
                    f"with exactly the fields {', '.join(checks)}."
                )
            checked.append(
                cls(
                    **{
                        name: one(f"{where}[{i}].{name}", given[name])
                        for name, one in checks.items()
                    }
                )
            )
        return checked

    return by(check)


_RATE = within("a learning rate, which is not negative", lambda x: x >= 0)
_text = must_be(
    "a non-empty string",
    lambda value: isinstance(value, str) and value != "",
    str.__str__,
)


# --- The recipe -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class NoiseProbe:
    """The noise at one step of a base run: one raw measurement, neither smoothed nor
    clipped.

    Attributes:
        effective_steps: τ at the probe, optimizer steps at the base batch.
        sigma2: σ², gradient variance of one base batch (squared units of the gradient).
        mu2: μ², squared norm of the true gradient (squared units of the gradient); a
            single probe may be negative.
    """

    effective_steps: float = field(metadata=by(number))
    sigma2: float = field(metadata=by(number))
    mu2: float = field(metadata=by(number))


def smoothing_width(tau: Any, total_steps: float) -> Any:
    """Return the effective steps over which a forecast smooths the noise at τ, a number
    or an array.

    It is 0.3·τ, but at least 0.006·T and at most 0.05·T: noise changes fastest at the
    beginning.
    """
    return np.clip(0.3 * tau, 0.006 * total_steps, 0.05 * total_steps)


_MOST = 110
_FEWEST = 10
"""Measurements of the noise in a long base run and in a short one."""
SHARE = 0.2
"""Most extra passes of a base run, as a share of T, unless the fewest measurements
make more.
"""


@functools.lru_cache(maxsize=4)
def probe_steps(
    total_steps: int, every: int | None = None, *, passes: int = 0, share: float = SHARE
) -> frozenset[int]:
    """Return the steps of a base run at which the noise is measured.

    Args:
        total_steps: T.
        every: Optimizer steps from one to the next. Default: a quarter of
            :func:`smoothing_width`, which makes about 110 measurements. In a short run
            it is longer, as ``share`` says.
        passes: Extra passes of one measurement.
        share: As :data:`SHARE`.
    """
    longer = max(1.0, passes * _MOST / max(share * total_steps, passes * _FEWEST, 1))
    steps = []
    step = 0
    while step < total_steps:
        steps.append(step)
        step += every or max(1, round(smoothing_width(step, total_steps) / 4 * longer))
    return frozenset(steps)


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """The winner's base run, repeated with another seed.

    Attributes:
        seed: Of weights and of the order of examples, ≥ 0.
        score: The metric's value at the end.
        noise: The probes of the repeat.
    """

    seed: int = field(metadata=by(integer(0)))
    score: float = field(metadata=by(number))
    noise: list[NoiseProbe] = field(metadata=_records(NoiseProbe, "probes"))


@dataclass(frozen=True, kw_only=True, repr=False)
class Recipe:
    """The winning hyperparameters of a search, their schedule, and the noise of their
    base run.

    Every field is checked on construction. Values are copied and converted to plain
    Python: NumPy scalars become numbers and tuples become lists, so a recipe equals the
    one read back from its file.

    Attributes:
        hyperparameters: The winning config, JSON values.
        base_batch_size: B0, examples per optimizer step.
        total_steps: T, effective steps of the whole run.
        base_steps_per_epoch: Optimizer steps per epoch at the base batch, len(dataset)
            / B0; None if unknown.
        scheduler_unit: What one ``scheduler.step()`` meant; None without a scheduler.
        metric: Name of the metric that the search optimised.
        mode: Whether a small (``"min"``) or a large (``"max"``) metric is better.
        score: The metric's value for these hyperparameters.
        lr_curve: ``lr_curve[group][k]`` is the parameter group's learning rate after k
            scheduler calls. One value per group without a scheduler; with one, a value
            for each call in a run (``curve_length``).
        noise: Single probes of the trial, in any order; none where the noise is that of
            the repeats.
        seed: The base seed of the search, ≥ 0.
        search: Facts about the search, JSON values: trials, searcher, scheduler, failed
            trials, best trial, wall seconds ...
        workload: The workload's name, ``"file.py:workload"`` or a qualified name. For
            people only.
        versions: Versions of ray_adascale, torch, ray and python during the search.
        created: Date and time in ISO 8601.
        repeats: The same hyperparameters with further seeds: one that confirms the
            winner, or those of a search with repeats. They show the random part of the
            score and the spread of the noise.
        settings: The fields of ``AdaScaleConfig`` that change what is trained, with the
            search's values: ``precision``, ``grad_clip``, ``shuffle``, ``drop_last``. A
            run with other values warns. A missing field is unknown; with None, all are.
        momentum: The momentum of the optimizer's first parameter group at the start of
            the base run, 0 ≤ m < 1. For Adam it is β1, and 0 for an optimizer without
            momentum. The forecast uses it. For a chain it is that of the optimizer with
            the most elements.

    Raises:
        RecipeError: A field of the wrong type or out of range, naming it.
    """

    hyperparameters: dict[str, Any] = field(metadata=by(json_object))
    base_batch_size: int = field(metadata=COUNT)
    total_steps: int = field(metadata=COUNT)
    base_steps_per_epoch: float | None = field(
        metadata=by(optional(within("positive", lambda x: x > 0)))
    )
    scheduler_unit: Literal["step", "epoch"] | None
    metric: str = field(metadata=by(_text))
    mode: Literal["min", "max"]
    score: float = field(metadata=by(number))
    lr_curve: list[list[float]]
    noise: list[NoiseProbe] = field(metadata=_records(NoiseProbe, "probes"))
    seed: int = field(metadata=by(integer(0)))
    search: dict[str, Any] = field(metadata=by(json_object))
    workload: str = field(
        metadata=by(
            must_be("a string", lambda value: isinstance(value, str), str.__str__)
        )
    )
    versions: dict[str, str] = field(metadata=by(_texts))
    created: str = field(metadata=by(_date))
    repeats: list[Repeat] = field(
        default_factory=list, metadata=_records(Repeat, "repeats")
    )
    settings: dict[str, Any] | None = field(
        default=None, metadata=by(optional(_settings))
    )
    momentum: float = field(
        default=0.0, metadata=by(within("at least 0 and below 1", lambda x: 0 <= x < 1))
    )

    def __post_init__(self) -> None:
        try:
            check_fields(self)
            object.__setattr__(self, "lr_curve", _checked_curve(self))
        except SettingError as error:
            raise RecipeError(str(error)) from None
        probes = {"noise": self.noise} | {
            f"repeats[{i}].noise": repeat.noise for i, repeat in enumerate(self.repeats)
        }
        for name, noise in probes.items():
            for i, probe in enumerate(noise):
                if not 0 <= probe.effective_steps <= self.total_steps:
                    raise RecipeError(
                        f"Invalid {name}[{i}].effective_steps={probe.effective_steps}. "
                        f"Must lie between 0 and total_steps={self.total_steps}."
                    )
        seeds = [self.seed, *(repeat.seed for repeat in self.repeats)]
        for i, seed in enumerate(seeds[1:]):
            if seed in seeds[: i + 1]:
                raise RecipeError(
                    f"Invalid repeats[{i}].seed={seed}. Must differ from the seeds of "
                    "the search and of other repeats."
                )

    def __repr__(self) -> str:
        """Return one short line. The curve and the probes of a recipe fill many
        screens.
        """
        return (
            f"Recipe({self.fingerprint}, workload={self.workload!r}, "
            f"base_batch_size={self.base_batch_size}, total_steps={self.total_steps}, "
            f"{self.metric}={self.score:.6g}, {sum(map(len, self.noise_by_seed))} "
            f"probes, {len(self.repeats)} repeats)"
        )

    @property
    def momentum_is_beta(self) -> bool:
        """Whether :attr:`momentum` is β1, which a rule for betas changes.
        ``search["momentum_is_beta"]``; if missing, whether the optimizer is not SGD.
        """
        return bool(self.search.get("momentum_is_beta", self.optimizer_class != "SGD"))

    @property
    def optimizer_class(self) -> str:
        """Name of the class of the optimizer that has :attr:`momentum`.
        ``search["optimizer_class"]``; empty if missing.
        """
        return str(self.search.get("optimizer_class", ""))

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that identify the schedule: B0, T, the LR curve and the
        unit of its index.

        A checkpoint stores the fingerprint to recognise its recipe. It does not depend
        on scores and hyperparameters.
        """
        epoch = self.base_steps_per_epoch if self.scheduler_unit == "epoch" else None
        schedule = [
            self.base_batch_size,
            self.total_steps,
            self.scheduler_unit,
            epoch,
            self.lr_curve,
        ]
        return _sha256(schedule)[:16]

    @property
    def noise_by_seed(self) -> list[list[NoiseProbe]]:
        """The probes of each base run that has any: the trial, then its repeats."""
        return [
            noise
            for noise in (self.noise, *(repeat.noise for repeat in self.repeats))
            if noise
        ]

    @property
    def repeat_scores(self) -> tuple[float, float] | None:
        """Mean and sample standard deviation of the repeats' scores; None with fewer
        than two repeats.

        The search's own score is left out, because it was selected as the best.
        """
        scores = [repeat.score for repeat in self.repeats]
        return (
            (statistics.mean(scores), statistics.stdev(scores))
            if len(scores) > 1
            else None
        )

    def describe(self) -> str:
        """Return a few lines for people."""
        unit = (
            f"one value per {self.scheduler_unit}"
            if self.scheduler_unit
            else "no scheduler"
        )
        curves = [_describe_curve(curve) for curve in self.lr_curve]
        epochs = (
            f", {self.total_steps / self.base_steps_per_epoch:.4g} epochs"
            if self.base_steps_per_epoch
            else ""
        )
        hyperparameters = ", ".join(
            f"{key}={value!r}" for key, value in self.hyperparameters.items()
        )
        lines = [
            f"Recipe {self.fingerprint} for {self.workload or 'an unnamed workload'}, "
            f"made {self.created}",
            f"  base batch   {self.base_batch_size} examples, {self.total_steps} "
            f"effective steps{epochs}",
            f"  score        {self.metric} = {self.score:.6g} "
            f"({self.mode}){_describe_repeats(self)}",
            f"  hyperparameters {hyperparameters or 'none'}",
            *(f"  LR, group {g}  {curve} ({unit})" for g, curve in enumerate(curves)),
            f"  noise        {_describe_noise(self)}",
            f"  settings     {_describe_settings(self.settings)}",
        ]
        lines += _describe_failures(self.search)
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the recipe, all of it or nothing. A missing folder is made.

        Args:
            path: A path, or a URI such as ``s3://bucket/recipe.json``.

        Raises:
            RecipeError: A field was changed in place to a value that can't be written.
        """
        # checks again: the dicts and lists inside are not frozen
        fields = _fields(dataclasses.replace(self))
        document = {
            "format": FORMAT,
            "version": VERSION,
            **fields,
            "digest": _digest(fields),
        }
        lines = []
        for key, value in document.items():
            if key in ("lr_curve", "noise", "repeats") and value:
                # A line per group, probe and repeat, so that a diff shows which one
                # changed and stays short.
                rows = ",\n".join(
                    f"    {json.dumps(row, allow_nan=False)}" for row in value
                )
                text = f"[\n{rows}\n  ]"
            else:
                text = json.dumps(value, indent=2, allow_nan=False).replace(
                    "\n", "\n  "
                )
            lines.append(f"  {json.dumps(key)}: {text}")
        write_anywhere(path, "{\n" + ",\n".join(lines) + "\n}\n")

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, accept_edits: bool = False
    ) -> Recipe:
        """Read a recipe and check every field.

        Args:
            path: A file that :meth:`save` wrote, or its URI.
            accept_edits: Accept a recipe that was edited after the search, if its
                fields are valid.

        Raises:
            RecipeError: The file is no recipe, has another version, has a missing,
                unknown or invalid field (the message names it), or was edited after the
                search.
            OSError: The file can't be read.
        """
        try:
            document = json.loads(fetched(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise RecipeError(
                f"{path} is not a recipe: it is not valid JSON ({error})."
            ) from error
        try:
            fields, digest = _open_document(document, digest_required=not accept_edits)
            recipe = cls(**fields)
        except (RecipeError, SettingError) as error:
            raise RecipeError(f"{path}: {error}") from error
        if digest != _digest(_fields(recipe)) and not accept_edits:
            raise RecipeError(
                f"{path}: the digest does not match. The file was edited after the "
                "search, so it is no longer the result of the search. Restore the "
                "file, or search again; in Python Recipe.load(path, accept_edits=True) "
                "loads it anyway."
            )
        return recipe


def curve_length(
    total_steps: int, scheduler_unit: str | None, base_steps_per_epoch: float | None
) -> int:
    """Return the values per group in a recipe's LR curve: the number of different
    learning rates in a run of T steps.

    The number is 1 without a scheduler. It is T for a scheduler that is called every
    step (a recipe may stop earlier, where the rest of the curve is constant). It is ⌊(T
    − 1) / base_steps_per_epoch⌋ + 1 for a scheduler that is called every epoch, with
    the schedule's tolerance for rounding: 1000 / (1000 / 3) is 3 epochs.
    """
    if scheduler_unit is None:
        return 1
    if scheduler_unit == "step":
        return total_steps
    if base_steps_per_epoch is None:
        raise RecipeError(
            "Invalid base_steps_per_epoch=None. Must be given where scheduler_unit is "
            "'epoch'."
        )
    try:
        return whole_number((total_steps - 1) / base_steps_per_epoch) + 1
    except OverflowError:
        raise RecipeError(
            f"Invalid {base_steps_per_epoch=}. Far too small for {total_steps=}."
        ) from None


# --- The document ---------------------------------------------------------------------


def _fields(recipe: Recipe) -> dict[str, Any]:
    """Return name -> JSON value. ``dataclasses.asdict`` would copy everything once
    more.
    """
    fields = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(recipe)}
    fields["noise"] = [dataclasses.asdict(probe) for probe in recipe.noise]
    fields["repeats"] = [dataclasses.asdict(repeat) for repeat in recipe.repeats]
    return fields


def _digest(fields: Mapping[str, Any]) -> str:
    """Return a digest of the values, not of the text: another indentation, order or
    spelling of 1e-05 is no edit.
    """
    return _sha256({"format": FORMAT, "version": VERSION, **fields})


def _sha256(value: Any) -> str:
    canonical = json.dumps(
        value, sort_keys=True, separators=(",", ":"), allow_nan=False
    )
    return hashlib.sha256(canonical.encode()).hexdigest()


def _open_document(
    document: Any, *, digest_required: bool
) -> tuple[dict[str, Any], Any]:
    if not isinstance(document, dict):
        raise RecipeError(
            f"not a recipe: a JSON {type(document).__name__} instead of an object."
        )
    # Format and version first: the fields of another version would be unknown.
    for name in ("format", "version"):
        if name not in document:
            raise RecipeError(
                f"Missing field {name!r}. Is this a recipe that Recipe.save wrote?"
            )
    if document["format"] != FORMAT:
        raise RecipeError(f"Invalid format={document['format']!r}. Must be {FORMAT!r}.")
    version = integer(1)("version", document["version"])
    if version != VERSION:
        raise RecipeError(
            f"Invalid version={version}: written by a newer library. ray_adascale "
            f"{__version__} reads version {VERSION}; upgrade ray_adascale."
        )
    names = [f.name for f in dataclasses.fields(Recipe)]
    for name in [*names, "digest"]:
        if name not in document and (name != "digest" or digest_required):
            raise RecipeError(
                f"Missing field {name!r}. Restore the file, or run the search again."
            )
    unknown = sorted(set(document) - {*names, "format", "version", "digest"})
    if unknown:
        raise RecipeError(
            f"Unknown fields {', '.join(map(repr, unknown))}. Remove them; put notes "
            "into 'search'."
        )
    digest = document.get("digest")
    if digest_required and not isinstance(digest, str):
        raise RecipeError(
            f"Invalid digest={digest!r}. Must be a string of hexadecimal digits."
        )
    return {name: document[name] for name in names}, digest


def _checked_curve(recipe: Recipe) -> list[list[float]]:
    curve = recipe.lr_curve
    if not isinstance(curve, list | tuple) or not curve:
        raise RecipeError(
            f"Invalid lr_curve: {short(curve)}. Must be a list with one list per "
            "parameter group."
        )
    full = curve_length(
        recipe.total_steps, recipe.scheduler_unit, recipe.base_steps_per_epoch
    )
    checked: list[list[float]] = []
    for g, group in enumerate(curve):
        if not isinstance(group, list | tuple) or not group:
            raise RecipeError(
                f"Invalid lr_curve[{g}]: {short(group)}. Must be a list of learning "
                "rates."
            )
        rates = [_RATE(f"lr_curve[{g}][{k}]", rate) for k, rate in enumerate(group)]
        if len(rates) > full or (len(rates) < full and recipe.scheduler_unit != "step"):
            raise RecipeError(
                f"Invalid lr_curve[{g}]: {len(rates)} values. Must be {full} for "
                f"total_steps={recipe.total_steps}, "
                f"scheduler_unit={recipe.scheduler_unit!r}, "
                f"base_steps_per_epoch={recipe.base_steps_per_epoch}."
            )
        if checked and len(rates) != len(checked[0]):
            raise RecipeError(
                f"Invalid lr_curve[{g}]: {len(rates)} values, but group 0 has "
                f"{len(checked[0])}."
            )
        checked.append(rates)
    return checked


# --- For people -----------------------------------------------------------------------


def _describe_curve(curve: list[float]) -> str:
    if len(curve) == 1:
        return f"{curve[0]:.4g}"
    return (
        f"{curve[0]:.4g} → {curve[-1]:.4g} over {len(curve)} values, highest "
        f"{max(curve):.4g}"
    )


def _describe_repeats(recipe: Recipe) -> str:
    """Return the number of trials that the score is the best of, and the scores with
    other seeds.
    """
    trials = recipe.search.get("trials")
    spread = recipe.repeat_scores
    of = f", of {trials} trials" if isinstance(trials, int) and trials > 1 else ""
    scores = ", ".join(
        f"{repeat.score:.6g} (seed {repeat.seed})" for repeat in recipe.repeats
    )
    mean = (
        ""
        if spread is None
        else f", mean {spread[0]:.6g}, standard deviation {spread[1]:.2g}"
    )
    return f"{of}; again {scores}{mean}" if scores else of


def _describe_failures(search: Mapping[str, Any]) -> list[str]:
    """Return lines about the failed trials and repeats of a search; none without
    one.
    """
    listed = search.get("failed")
    failed = (
        [each for each in listed if isinstance(each, dict)]
        if isinstance(listed, list)
        else []
    )
    lines = [
        f"    failed     {each.get('at', each.get('trial'))}: {each.get('error')}"
        for each in failed
    ]
    return (
        [
            f"  search       {search.get('trials', '?')} trials, {len(lines)} failed:",
            *lines,
        ]
        if lines
        else []
    )


def _describe_settings(settings: dict[str, Any] | None) -> str:
    return (
        ", ".join(f"{name}={value!r}" for name, value in settings.items())
        if settings
        else "not kept"
    )


def _describe_noise(recipe: Recipe) -> str:
    first, *others = recipe.noise_by_seed or [[]]
    if not first:
        return "not probed"
    # A ratio of means over the run: the ratio of single probes has no mean. Probes are
    # denser at the beginning.
    tau = [probe.effective_steps for probe in first]
    share = np.diff([*tau, max(recipe.total_steps, tau[-1] + 1)])
    sigma2 = float(share @ [probe.sigma2 for probe in first])
    mu2 = float(share @ [probe.mu2 for probe in first])
    scale = (
        f"about {plain_noise_scale(sigma2, mu2, recipe.base_batch_size):.3g} examples"
    )
    if not (mu2 > 0 and sigma2 >= 0):
        scale = f"unknown: the mean {'σ² is below' if mu2 > 0 else 'μ² is not above'} 0"
    more = f" and {sum(map(len, others))} with other seeds" if any(others) else ""
    return f"{len(first)} probes{more}; noise scale over the whole run {scale}"
