"""Draws cases from seeds, and says which of them the documentation refuses."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from typing import Any

from .case import COVERED, SCHEDULERS, Case, Leg
from .reference_run import batch_of

__all__ = ["allowed", "draw", "refusal", "values"]

# Crossings that are known to be wrong, while they are mended elsewhere.
# A resume that changes B0 keeps the σ² of single examples that was measured at the old B0.
HELD_OVER_ANOTHER_BASE = True

_SHARDINGS = ("none", "oss", "zero2", "fsdp2")
_ADAMS = ("adam", "amsgrad", "adamw")
_RULES = ("adascale", "adascale", "adascale_betas", "adamscale", "linear", "sqrt", "unscaled", "legw", "lsw+")


def refusal(case: Case) -> str | None:
    """Return a pattern of the error with which a case is documented to be refused; None if it must run."""
    run, found = case.client == "run", []
    for i, leg in enumerate(case.legs):
        batch, _ = batch_of(leg)
        sharded = leg.workers > 1
        measured = leg.workers * leg.passes > 1 or batch != leg.base
        before = case.legs[max(i - 1, 0)]
        found += [
            run and batch < leg.base and "larger than the global batch|smaller than base_batch_size",
            run and case.drop_last and batch > case.length and "every batch would be dropped",
            case.rule == "adascale_betas" and case.optimizer in ("sgd", "rmsprop") and "changes betas|keeps",
            run and case.rule == "adamscale" and leg.sharding != "none" and "with the rule AdamScale",
            case.rule == "adamscale" and case.optimizer not in _ADAMS and "need torch.optim.Adam",
            case.rule == "adamscale" and case.noise == "per_example" and "excludes precondition",
            sharded and leg.sharding == "fsdp2" and case.precision == "fp16" and "Use precision='bf16'",
            sharded
            and leg.sharding == "fsdp2"
            and case.fused
            and case.optimizer == "sgd"
            and "can't step the shards of fully_shard",
            measured and case.noise == "per_example" and case.net not in COVERED and "per-example|per_example",
            run
            and not leg.accept
            and (leg.base, leg.total) != (before.base, before.total)
            and "The run was changed since",
        ]
    return "|".join(filter(None, found)) or None


def allowed(case: Case) -> bool:
    """Return whether a case is one to run: its settings can be expressed, and it is not among what torch can't do."""
    run, legs = case.client == "run", case.legs
    sgd, betas = case.optimizer == "sgd", case.rule == "adascale_betas"
    shardings = {leg.sharding for leg in legs if leg.workers > 1}
    several = len(legs) > 1
    bare_only = (
        case.smoothing, case.effective, case.debias, case.clip_samples, case.floor, case.single_gain, case.scaled_loss,
        case.changes, case.short, case.added,
    )  # fmt: skip
    plain = (None, False, True, True, 0.0, False, True, (), (), None)
    checks = [
        # what torch's optimizers accept
        sgd or (case.momentum, case.dampening, case.nesterov) == (0.0, 0.0, False),
        not case.nesterov or (case.momentum > 0 and case.dampening == 0),
        not case.dampening or case.momentum > 0,
        not case.fused or case.optimizer in ("sgd", *_ADAMS),
        case.optimizer != "muon" or case.groups <= 2,
        case.optimizer != "muon" or (not case.maximize and not case.fused and case.net != "conv"),
        # the settings of a client
        run or not case.drop_last,
        run or case.precision == "fp32",
        run or case.scheduler is None or case.unit == "step",
        not run or bare_only == plain,
        not run or case.via == "checkpoint",
        run or case.via != "checkpoint" or not several,
        not run or legs[-1].steps is None or not several,
        run or all((leg.base, leg.total) == (legs[0].base, legs[0].total) for leg in legs),
        run or all(leg.batch is None for leg in legs),
        case.scheduler is not None or case.unit == "step",
        all((leg.batch is None) != (leg.per_worker is None) for leg in legs)
        or (run and all(leg.per_worker for leg in legs)),
        all(leg.total >= 5 for leg in legs),
        all(legs[i].total >= legs[i - 1].total for i in range(1, len(legs))),
        all(leg.steps is not None for leg in legs[:-1]),
        not case.effective or case.smoothing is None,
        # the literal model's Adam with other betas in each step is that of AdamW and Adamax
        not betas or case.optimizer in ("adamw", "adamax", "sgd"),
        not betas or not (case.optimizer == "adamax" and (case.weight_decay or case.groups > 1)),
        # torch: reduced precision is of float32 weights; fully_shard needs a gradient of every parameter
        (case.precision == "fp32") or case.dtype == "float32",
        case.net != "branch" or "fsdp2" not in shardings,
        case.noise == "samples"
        or all(batch_of(leg)[0] > 1 and (run or leg.per_worker * leg.workers > 1) for leg in legs),
        # one gradient sample above S = 1 is measured by examples alone
        all(
            leg.workers * passes > 1 or case.noise == "per_example" or _scale(case, leg, passes) == 1
            for leg in legs
            for passes in {batch_of(leg)[1], *(count for _, count in case.changes)}
        ),
        not (HELD_OVER_ANOTHER_BASE and case.noise == "per_example" and len({leg.base for leg in legs}) > 1),
        # the state dict of an optimizer with DTensors goes through torch.distributed.checkpoint
        case.via != "state_dict" or not several or "fsdp2" not in shardings,
        # DDP does not reduce parameters that were frozen when it was built
        case.frozen is None or case.frozen[0] > 0,
        case.frozen is None or (case.noise == "samples" and "fsdp2" not in shardings and not several),
    ]
    return all(checks)


def _scale(case: Case, leg: Leg, passes: int) -> float:
    if case.client == "run":
        return batch_of(leg)[0] / leg.base
    assert leg.per_worker is not None
    return leg.workers * passes * leg.per_worker / leg.base


def _leg(rng: random.Random, run: bool, base: int, total: int) -> Leg:
    given = run and rng.random() < 0.4
    workers = rng.choices((1, 2, 3, 4), (4, 4, 2, 1))[0]
    return Leg(
        workers=workers,
        passes=rng.choices((1, 2, 3, 4), (4, 4, 2, 1))[0],
        per_worker=rng.choice((None, 3, 5)) if given else rng.randint(1, 5),
        batch=rng.randint(base, 5 * base) if given else None,
        base=base,
        total=total,
        steps=rng.randint(1, 5),
        accept=rng.random() < 0.8,
        sharding=rng.choice(_SHARDINGS),
    )


def _any_case(rng: random.Random) -> Case:
    def maybe(share: float, value: Any, otherwise: Any) -> Any:
        return value if rng.random() < share else otherwise

    run = rng.random() < 0.6
    base, total = rng.randint(2, 6), rng.randint(5, 14)
    legs = []
    for _ in range(rng.choices((1, 2, 3), (5, 4, 2))[0]):
        legs.append(_leg(rng, run, base, total))
        if run and rng.random() < 0.2:
            base = rng.randint(2, 6)
        if run and rng.random() < 0.2:
            total += rng.randint(1, 4)
    legs[-1] = replace(legs[-1], steps=None)
    rule = rng.choice(_RULES)
    if rule == "adamscale" and rng.random() < 0.95:
        legs = [replace(leg, sharding="none") for leg in legs]
    of_rule = {"adascale_betas": ("adamw", "adamax"), "adamscale": _ADAMS}
    known = of_rule.get(rule, ("sgd", "sgd", "sgd", "adam", "amsgrad", "adamw", "adamax", "rmsprop", "muon"))
    optimizer = rng.choice(known) if rng.random() < 0.97 else "sgd"
    sgd, momentum = optimizer == "sgd", rng.choice((0.0, 0.9, 0.5))
    nesterov = sgd and momentum > 0 and rng.random() < 0.4
    scheduler = maybe(0.85, rng.choice(SCHEDULERS), None)
    noise = maybe(0.3, "per_example", "samples")
    bare: dict[str, Any] = {}
    if not run:
        bare = {
            "effective": maybe(0.3, True, False),
            "smoothing": maybe(0.2, rng.choice((0.0, 0.5, 0.9)), None),
            "debias": maybe(0.6, True, False),
            "clip_samples": maybe(0.7, True, False),
            "floor": maybe(0.2, 1e-6, 0.0),
            "single_gain": maybe(0.3, True, False),
            "scaled_loss": maybe(0.7, True, False),
            "changes": maybe(0.3, ((rng.randint(1, 3), rng.randint(1, 4)),), ()),
            "short": maybe(0.3, ((rng.randint(0, 4), rng.randint(1, 3)),), ()),
        }
    return Case(
        client="run" if run else "adascale",
        legs=tuple(legs),
        via="checkpoint" if run else "state_dict",
        net=rng.choice(
            ("mlp", "conv", "words") if noise == "per_example" else ("mlp", "conv", "words", "tied", "twice", "branch")
        ),
        optimizer=optimizer,
        momentum=momentum if sgd else 0.0,
        nesterov=nesterov,
        dampening=maybe(0.3, 0.3, 0.0) if sgd and momentum > 0 and not nesterov else 0.0,
        weight_decay=maybe(0.4, 0.05, 0.0) if optimizer != "adamax" else 0.0,
        maximize=maybe(0.15, optimizer != "muon", False),
        fused=maybe(0.1, optimizer in ("sgd", *_ADAMS), False),
        groups=1 if rule == "adascale_betas" and optimizer == "adamax" else rng.choices((1, 2, 3), (3, 3, 2))[0],
        scheduler=scheduler,
        unit=maybe(0.3, "epoch", "step") if scheduler and run else "step",
        rule=rule,
        noise=noise,
        every=maybe(0.5, True, False),
        precision=rng.choices(("fp32", "bf16", "fp16"), (8, 1, 1))[0] if run else "fp32",
        dtype=maybe(0.85, "float64", "float32"),
        clip=maybe(0.3, rng.choice((0.5, 2.0, 1e9)), None),
        poison=tuple((rng.randint(0, 6), rng.randint(0, 1)) for _ in range(rng.choice((0, 0, 0, 1, 2)))),
        frozen=maybe(0.15, (rng.randint(1, 3), rng.randint(3, 8)), None),
        window=rng.choice((0.05, 0.1, 0.3, 1.0)),
        length=rng.randint(17, 61),
        seed=rng.randint(0, 10**6),
        drop_last=maybe(0.25, run, False),
        shuffle=maybe(0.9, True, False),
        **bare,
    )


def draw(seed: str) -> Case:
    """Return the case of a seed."""
    rng = random.Random(seed)
    refused = rng.random() < 0.06
    while True:
        case = _any_case(rng)
        if case.precision != "fp32":
            case = replace(case, dtype="float32")
        if allowed(case) and (refusal(case) is not None) == refused and _sensible(case):
            return case


def _sensible(case: Case) -> bool:
    """Return whether the parts of the case that are drawn for certain steps and workers have an effect."""
    passes = min(batch_of(leg)[1] for leg in case.legs)
    return (
        all(count < passes for _, count in case.short)
        and not (case.short and case.changes)
        and sum(leg.steps or 0 for leg in case.legs) < 12
    )


def _share(x: float) -> str:
    return "1" if x == 1 else "whole" if x == int(x) else "other"


def values(case: Case) -> dict[str, str]:
    """Return a value of each dimension, for the table of pairs."""
    first, last = case.legs[0], case.legs[-1]
    batch, passes = batch_of(first)
    kinds = {"none"} if len(case.legs) == 1 else set()
    for a, b in zip(case.legs, case.legs[1:], strict=False):
        kinds.add("workers" if a.workers != b.workers else "base" if a.base != b.base else "same")
    workers = first.workers
    return {
        "client": case.client,
        "workers": str(workers),
        "passes": str(min(passes, 4)),
        "even": str(batch % (workers * passes) == 0),
        "scale": _share(batch / first.base),
        "sharding": first.sharding if workers > 1 else "none",
        "sharding, end": last.sharding if last.workers > 1 else "none",
        "resumed with": "workers" if "workers" in kinds else sorted(kinds)[0],
        "accepted": str(len({(leg.base, leg.total) for leg in case.legs}) > 1),
        "optimizer": case.optimizer + "+m" * (case.momentum > 0) + "+n" * case.nesterov + "+d" * (case.dampening > 0),
        "decay": str(case.weight_decay > 0),
        "maximize": str(case.maximize),
        "fused": str(case.fused),
        "groups": str(case.groups),
        "scheduler": str(case.scheduler),
        "unit": case.unit,
        "rule": case.rule,
        "noise": case.noise + ("" if case.every or case.noise == "samples" else ", rarely"),
        "precision": case.dtype if case.precision == "fp32" else case.precision,
        "net": case.net,
        "clip": str(case.clip is not None),
        "skipped": str(bool(case.poison)),
        "frozen": str(case.frozen is not None),
        "drop_last": str(case.drop_last),
        "shuffle": str(case.shuffle),
        "averages": "effective"
        if case.client == "run" or case.effective
        else "θ"
        if case.smoothing is not None
        else "n",
        "debias": str(case.debias),
        "clipped": "samples" if case.client != "run" and case.clip_samples else "averages",
        "single gain": str(case.client == "run" or case.single_gain),
        "scaled loss": str(case.scaled_loss),
        "passes change": "changed" if case.changes else "short" if case.short else "no",
    }


def smaller(case: Case) -> list[Case]:
    """Return cases that are simpler in one place each, the largest simplification first."""
    out, plain = [], Case()
    for i in range(len(case.legs)):
        if len(case.legs) > 1:
            kept = list(case.legs[:i] + case.legs[i + 1 :])
            kept[-1] = replace(kept[-1], steps=None)
            out.append(replace(case, legs=tuple(kept)))
    out += [
        replace(case, **{f.name: getattr(plain, f.name)})
        for f in fields(Case)
        if f.name != "legs" and getattr(case, f.name) != getattr(plain, f.name)
    ]
    for i, leg in enumerate(case.legs):
        for name, value in {"workers": 1, "passes": 1, "sharding": "none", "accept": True, "batch": None}.items():
            if getattr(leg, name) != value:
                changed = replace(leg, **{name: value}, **({"per_worker": 4} if name == "batch" else {}))
                out.append(replace(case, legs=(*case.legs[:i], changed, *case.legs[i + 1 :])))
        if leg.workers > 2:
            out.append(replace(case, legs=(*case.legs[:i], replace(leg, workers=2), *case.legs[i + 1 :])))
        if i and (leg.base, leg.total) != (case.legs[0].base, case.legs[0].total):
            same = replace(leg, base=case.legs[0].base, total=case.legs[0].total)
            out.append(replace(case, legs=(*case.legs[:i], same, *case.legs[i + 1 :])))
    return out
