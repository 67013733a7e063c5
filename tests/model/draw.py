"""Draws cases from seeds, and says which of them the documentation refuses."""

from __future__ import annotations

import math
import random
from dataclasses import fields, replace
from typing import Any

from .base import batch_of, examples_of, shape_of
from .case import NETS, SCHEDULERS, Case, Leg, net, units_of

_SHARDINGS = ("none", "oss", "zero2", "fsdp2")
_ADAMS = ("adam", "amsgrad", "adamw")
_RULES = (
    "adascale",
    "adascale",
    "adascale_memory",
    "adamscale",
    "linear",
    "sqrt",
    "unscaled",
    "legw",
    "lsw+",
)


def refusal(case: Case) -> str | None:
    """Return a pattern of the error with which a case is documented to be refused;
    None if it must run.
    """
    run, bare, found = case.client == "run", case.own_loop, []
    attached = case.client == "attach"
    follows = case.rule in ("adascale", "adascale_memory", "adamscale")
    adam, fixed = case.rule == "adamscale", not (case.batches or case.efficiency)
    matrices = (
        [p for p in net(case).parameters() if p.ndim == 2]
        if case.optimizer == "muon"
        else []
    )
    fewest_rows = min((len(p) for p in matrices), default=99)
    for i, leg in enumerate(case.legs):
        start = sum(each.steps or 0 for each in case.legs[:i])
        changed = [passes for step, passes in case.changes if step <= start]
        batch, _ = batch_of(replace(leg, passes=changed[-1]) if changed else leg)
        sharding = leg.sharding if leg.workers > 1 else "none"
        before = case.legs[max(i - 1, 0)]
        found += [
            (
                (attached or not bare) and case.scheduler == "plateau",
                "ReduceLROnPlateau",
            ),
            (
                (run or attached) and fixed and batch < leg.base,
                "smaller than the base batch|smaller than base_batch_size",
            ),
            (
                case.iterable and leg.workers * leg.passes == 1 and batch > leg.base,
                "tells nothing of the noise",
            ),
            (
                run and case.drop_last and batch > case.length,
                "every batch would be dropped",
            ),
            (
                run and case.efficiency is not None and not follows,
                "the clock of that rule advances by the scale",
            ),
            (
                case.rule == "adascale_memory" and case.optimizer == "rmsprop",
                "changes betas|keeps",
            ),
            (run and adam and leg.sharding != "none", "with the rule AdamScale"),
            (not run and adam and sharding != "none", "precondition= needs"),
            (adam and case.optimizer not in _ADAMS, "need torch.optim.Adam"),
            (run and adam and isinstance(case.clip, str), "divided as Adam does"),
            (
                run and sharding == "fsdp2" and case.precision == "fp16",
                "Use precision='bf16'",
            ),
            (
                sharding == "fsdp2" and case.fused and case.optimizer == "sgd",
                "can't step the shards of fully_shard",
            ),
            (
                sharding == "fsdp2" and fewest_rows < leg.workers,
                "can't step the shards of fully_shard: .* fails with a matrix",
            ),
            (
                case.bare_model and leg.workers > 1 and sharding in ("none", "oss"),
                r"run\.model\(\.\.\.\) was not called",
            ),
            (
                run and not leg.accept and _fixed(leg) != _fixed(before),
                "The run was changed since",
            ),
        ]
    return "|".join(pattern for refused, pattern in found if refused) or None


def _fixed(leg: Leg) -> tuple[int, int, float]:
    """Return what may change in a resume only where that is accepted."""
    return leg.base, leg.total, leg.lr


def allowed(case: Case) -> bool:
    """Return whether a case is one to run: its settings can be expressed, and it is
    not among what torch can't do.
    """
    run, base_run, bare = (
        case.client == "run",
        case.client == "base",
        case.own_loop,
    )
    attached = case.client == "attach"
    legs, plain = case.legs, Case()
    total = legs[0].total
    sgd, betas = case.optimizer == "sgd", case.rule == "adascale_memory"
    shardings = {leg.sharding for leg in legs if leg.workers > 1}
    several = len(legs) > 1
    of_class = (
        "smoothing", "effective", "debias", "clip_samples", "floor", "single_gain", "scaled_loss", "rescaled", "added",
        "smoothed_by_scale",
    )  # fmt: skip
    of_loop = ("changes", "short", "left_out", "divided", "told", "ends", "unhooked")
    of_run = (
        "iterable", "loaders", "batches", "efficiency", "evaluate", "bare_model",
        "sampled", "collated", "followed", "by_text", "patience",
    )  # fmt: skip

    def default(*names: str) -> bool:
        """Whether the case has the plainest value of each."""
        return all(getattr(case, name) == getattr(plain, name) for name in names)

    starts = [sum(leg.steps or 0 for leg in legs[:i]) for i in range(len(legs))]
    checks = [
        # what torch's optimizers accept
        sgd or default("momentum", "dampening", "nesterov"),
        not case.nesterov or (case.momentum > 0 and case.dampening == 0),
        not case.dampening or case.momentum > 0,
        not case.fused or case.optimizer in ("sgd", *_ADAMS),
        case.optimizer != "muon"
        or (case.groups <= 2 and default("maximize", "fused") and case.net != "conv"),
        # torch's fused SGD fails where some parameters have a momentum buffer and
        # others none yet
        not (case.fused and case.momentum)
        or (case.net != "branch" and default("frozen", "added")),
        # the settings of a client
        (bare and not attached) or default(*of_class),
        bare or default(*of_loop),
        run or default(*of_run),
        run or attached or default("starting"),
        not attached or all(leg.sharding == "none" for leg in legs),
        bare or case.via == "checkpoint",
        not bare or not several or case.via != "checkpoint",
        not bare
        or (
            default("drop_last")
            and (attached or case.unit == "step")
            and case.precision != "bf16"
        ),
        not bare
        or all((*_fixed(leg), leg.batch) == (*_fixed(legs[0]), None) for leg in legs),
        legs[0].lr == 1,
        # a start of a run that has ended saves nothing, so that the last checkpoint may
        # be that of an earlier start
        all(
            leg.accept or len({_fixed(x) for x in legs[:i]}) <= 1
            for i, leg in enumerate(legs)
        ),
        not base_run
        or (
            default("poison", "frozen", "hooked", "caught", "precision", "window")
            and case.rule == "unscaled"
        ),
        not base_run or (not several and legs[0].base > 1),
        not base_run
        or (legs[0].workers, legs[0].passes, legs[0].per_worker) == (1, 1, legs[0].base)
        or (
            legs[0].workers > 1
            and legs[0].batch == legs[0].base == batch_of(legs[0])[0]
        ),
        base_run or default("probe_every"),
        case.scheduler is not None or case.unit == "step",
        not bare or attached or case.scheduler != "plateau",
        all(leg.batch is not None or leg.per_worker is not None for leg in legs),
        all(legs[i].total >= legs[i - 1].total for i in range(1, len(legs))),
        all(leg.steps is not None for leg in legs[:-1]) and legs[-1].steps is None,
        not case.effective or case.smoothing is None,
        case.measure_every is None or run or attached or case.effective,
        # the literal model's Adam with other betas in each step is that of AdamW and
        # Adamax
        not betas or case.optimizer in ("adamw", "adamax", "sgd"),
        not betas
        or not (case.optimizer == "adamax" and (case.weight_decay or case.groups > 1)),
        # torch: reduced precision is of float32 weights; fully_shard needs a gradient
        # of every parameter
        case.precision == "fp32" or case.dtype == "float32",
        # eight times as large may be an overflow in fp16; without clipping a run diverges
        case.spike is None
        or (
            case.precision == "fp32"
            and not base_run
            and (case.recipe or case.clip not in (None, 1e9))
        ),
        case.net != "branch" or "fsdp2" not in shardings,
        not bare or case.precision == "fp32" or "fsdp2" not in shardings,
        all(_measurable(case, leg) for leg in legs),
        # the state dict of an optimizer with DTensors goes through
        # torch.distributed.checkpoint
        case.via != "state_dict" or not several or "fsdp2" not in shardings,
        # torch's functions step an optimizer without state, and save that; they want a
        # state of each trainable parameter; they know each parameter by one name; and
        # they fail with the whole state of an SGD without momentum
        case.via != "dcp" or not sgd or case.momentum > 0,
        case.via != "dcp"
        or (
            default("precision", "poison")
            and case.net not in ("tied", "twice", "branch")
        ),
        # they leave out the state of parameters that are frozen when it is loaded; and
        # parameters that were frozen in all steps so far have no state
        case.via != "dcp"
        or all(
            start not in case.frozen
            and set(range(start)) - set(case.frozen) - set(case.left_out)
            for start in starts[1:]
        ),
        # DDP does not reduce parameters that were frozen when it was built
        not case.frozen
        or all(
            (0 if run else start) not in case.frozen
            or leg.workers == 1
            or leg.sharding in ("zero2", "fsdp2")
            for start, leg in zip(starts, legs, strict=True)
        ),
        # a tensor hook needs a trainable tensor; FSDP2 gives gradients to tensors of
        # its own
        case.hooked is None
        or ("fsdp2" not in shardings and not {case.hooked, *starts} & {*case.frozen}),
        # several workers start again; an iterable has no place to go back to; and
        # forward passes that are repeated move buffers
        case.caught is None
        or (not shardings and not case.iterable and case.net != "norm"),
        # a loop of the run's own; dropout's examples can't be compared
        not base_run or (default("looks") and case.quiet in (None, 0)),
        case.net != "merges" or case.quiet == 0,
        # FSDP2 leaves whole weights after an evaluation in the loop, and what train()
        # writes to these is lost; autocast, which is around the loop's body up to
        # run.backward(), keeps copies of the merged weights for the training pass
        case.net != "merges"
        or case.looks is None
        or ("fsdp2" not in shardings and case.precision == "fp32"),
        # torch adds no whole tensor to the shards of one with fewer rows than workers, in
        # place as eval() of a merging layer does
        case.net != "merges"
        or all(leg.workers < 4 or leg.sharding != "fsdp2" for leg in legs),
        case.net in ("merges", "norm") or default("quiet"),
        # only Run saves and loads a model
        case.net != "hooked" or run,
        case.added is None
        or (
            shardings <= {"zero2"}
            and not several
            and default("frozen", "scheduler", "changes")
        ),
        case.added is None
        or (
            case.debias
            and case.optimizer != "muon"
            and case.net in ("mlp", "conv", "words")
        ),
        case.added is None or (not betas and case.rule not in ("adamscale", "legw")),
        not case.rescaled or default("changes", "short"),
        # refused in the first step, to which a start after T does not come
        not case.bare_model or not several,
        # batches of the run's own
        not case.iterable
        or (
            not several
            and default("drop_last", "shuffle", "loaders", "batches", "efficiency")
        ),
        not case.iterable
        or (
            legs[0].batch is None
            and case.length // legs[0].workers >= (legs[0].per_worker or 0)
        ),
        not case.loaders or (not several and legs[0].workers == 1),
        not (case.batches or case.efficiency)
        or (default("drop_last") and all(leg.batch is None for leg in legs)),
        # nothing sends the buffers in a loop of one's own with fully_shard
        not bare or case.net != "norm" or "fsdp2" not in shardings,
        not case.units
        or (
            not base_run
            and total < 100
            and default("poison", "iterable", "batches", "efficiency")
            and _has_units(case)
        ),
        not case.starting
        or (case.starting < total and default("drop_last", "iterable", "loaders")),
        not (case.sampled or case.collated) or default("iterable", "loaders"),
        not case.by_text or bool(case.batches),
        not case.smoothed_by_scale or (case.smoothing is None and not case.effective),
        not case.left_out or case.precision == "fp32",
        not case.divided or (bool(case.short) and case.scaled_loss),
        default("told") or bool(case.short),
        # a loop of several passes that nobody sees has no last one that step_end tells
        not case.ends
        or (
            bool(case.short)
            and all(step < _first_unhooked(case) for step, _ in case.short)
        ),
        case.by_epochs is None
        or (case.client != "adascale" and all(leg.base <= case.length for leg in legs)),
        not case.recipe
        or (
            (run or attached)
            and case.scheduler != "plateau"
            and case.by_epochs is None
            and len({_fixed(leg) for leg in legs}) == 1
        ),
        # rounding may part two runs whose scores are near
        case.patience is None
        or (case.evaluate is not None and case.dtype == "float64"),
        all(not leg.elastic or (run and leg.batch is None) for leg in legs),
        # the client's batch may change, to one of at least a base batch
        not attached
        or all(
            leg.workers * passes * (leg.per_worker or 0) >= leg.base
            for leg in legs
            for _, passes in case.changes
        ),
        case.rule != "cautious" or (not base_run and default("efficiency")),
        not (case.batches and case.efficiency),
        not case.batches
        or min(b for _, b in case.batches) >= max(leg.base for leg in legs),
    ]
    return all(checks)


def _first_unhooked(case: Case) -> float:
    return math.inf if case.unhooked is None else case.unhooked


def _measurable(case: Case, leg: Leg) -> bool:
    """Return whether the noise of a start's steps can be measured at all."""
    if case.client == "run":
        return True  # the run makes two passes
    counts = {leg.passes, *(count for _, count in case.changes)}
    return all(
        leg.workers * passes > 1 or (leg.per_worker == leg.base and not case.rescaled)
        for passes in counts
    )


def _leg(rng: random.Random, run: bool, base: int, total: int) -> Leg:
    given = run and rng.random() < 0.4
    workers = rng.choices((1, 2, 3, 4), (6, 6, 2, 1))[0]
    return Leg(
        workers=workers,
        passes=rng.choices((1, 2, 3, 4), (4, 4, 2, 1))[0],
        per_worker=rng.choice((None, 3, 5)) if given else rng.randint(1, 5),
        batch=rng.randint(base, 5 * base) if given else None,
        base=base,
        total=total,
        steps=rng.randint(1, 5),
        accept=rng.random() < 0.8,
        sharding=rng.choices(_SHARDINGS, (3, 3, 3, 2))[0],
    )


def _any_case(rng: random.Random) -> Case:
    def maybe(share: float, value: Any, otherwise: Any) -> Any:
        return value if rng.random() < share else otherwise

    client = rng.choices(("run", "adascale", "attach", "base"), (50, 36, 24, 4))[0]
    run, base_run = client == "run", client == "base"
    attached = client == "attach"
    bare = client == "adascale" or attached
    base, total = rng.randint(2, 6), rng.randint(5, 14)
    legs = []
    for _ in range(1 if base_run else rng.choices((1, 2, 3), (5, 4, 2))[0]):
        legs.append(_leg(rng, run, base, total))
        if run and rng.random() < 0.2:
            base = rng.randint(2, 6)
        if run and rng.random() < 0.25:
            legs[-1] = replace(legs[-1], lr=0.5 if len(legs) > 1 else 1.0)
        if run and rng.random() < 0.2:
            total += rng.randint(1, 4)
    legs[-1] = replace(legs[-1], steps=None)
    if base_run:
        legs = [Leg(base=base, per_worker=base, total=total)]
        if rng.random() < 0.5:
            legs = [
                Leg(
                    workers=rng.randint(2, 3),
                    passes=rng.randint(1, 2),
                    per_worker=rng.choice((None, 1, 2)),
                    batch=base,
                    base=base,
                    total=total,
                    sharding=rng.choice(_SHARDINGS),
                )
            ]
    if attached:
        legs = [replace(leg, sharding="none") for leg in legs]
    rule = "unscaled" if base_run else rng.choice(_RULES)
    if rule == "adamscale" and rng.random() < 0.95:
        legs = [replace(leg, sharding="none") for leg in legs]
    if bare and not attached and rng.random() < 0.1:
        legs = [replace(leg, sharding="zero2") for leg in legs]
    of_rule = {"adascale_memory": ("adamw", "adamax", "sgd"), "adamscale": _ADAMS}
    span = tuple(range(rng.randint(0, 3), rng.randint(4, 8)))
    known = of_rule.get(
        rule,
        ("sgd", "sgd", "sgd", "adam", "amsgrad", "adamw", "adamax", "rmsprop", "muon"),
    )
    optimizer = rng.choice(known) if rng.random() < 0.97 else "sgd"
    # the default's floor of 1/2 acts on 0.55 from a gain of 1.35 on
    momenta = (0.9, 0.55) if rule == "adascale_memory" else (0.0, 0.9, 0.5)
    sgd, momentum = optimizer == "sgd", rng.choice((*momenta, 0.2, 0.55))
    nesterov = sgd and momentum > 0 and rng.random() < 0.4
    scheduler = (
        maybe(0.85, rng.choice(SCHEDULERS), None) if rng.random() < 0.98 else "plateau"
    )
    more: dict[str, Any] = {}
    if attached:
        more = {
            "changes": maybe(0.2, ((rng.randint(1, 3), rng.randint(1, 4)),), ()),
            "short": maybe(0.25, ((rng.randint(0, 4), rng.randint(1, 3)),), ()),
        }
    elif bare:
        more = {
            "effective": maybe(0.3, True, False),
            "smoothing": maybe(0.2, rng.choice((0.0, 0.5, 0.9)), None),
            "debias": maybe(0.6, True, False),
            "clip_samples": maybe(0.7, True, False),
            "floor": maybe(0.2, 1e-6, 0.0),
            "single_gain": maybe(0.3, True, False),
            "scaled_loss": maybe(0.7, True, False),
            "changes": maybe(0.2, ((rng.randint(1, 3), rng.randint(1, 4)),), ()),
            "short": maybe(0.25, ((rng.randint(0, 4), rng.randint(1, 3)),), ()),
            "rescaled": maybe(
                0.15, ((rng.randint(0, 4), rng.choice((0.75, 2.0))),), ()
            ),
            "added": maybe(0.2, rng.randint(1, 4), None),
        }
        if more["added"]:
            scheduler = None
    elif run:
        batches = (
            (0, rng.randint(base, 12)),
            (rng.randint(1, 3), rng.randint(base, 20)),
            (5, rng.randint(base, 30)),
        )
        more = {
            "iterable": maybe(0.06, True, False),
            "loaders": maybe(0.015, 1, 0),
            "batches": maybe(0.1, batches, ()),
            "efficiency": maybe(0.1, rng.choice((0.4, 0.6, 0.8, 1.0)), None),
            "bare_model": maybe(0.05, True, False),
            "evaluate": maybe(0.3, rng.choice((1.0, 2.5)), None),
        }
        if more["batches"] or more["efficiency"] or more["iterable"]:
            legs = [
                replace(leg, batch=None, per_worker=leg.per_worker or base)
                for leg in legs
            ]
    else:
        more = {"probe_every": rng.randint(1, 4)}
    kind = rng.choice(tuple(NETS))
    return Case(
        client=client,
        legs=tuple(legs),
        via=rng.choice(("state_dict", "dcp"))
        if bare and len(legs) > 1
        else "checkpoint",
        net=kind,
        optimizer=optimizer,
        momentum=momentum if sgd else 0.0,
        nesterov=nesterov,
        dampening=maybe(0.3, 0.3, 0.0)
        if sgd and momentum > 0 and not nesterov
        else 0.0,
        weight_decay=maybe(0.4, 0.05, 0.0) if optimizer != "adamax" else 0.0,
        maximize=maybe(0.15, optimizer != "muon", False),
        fused=maybe(0.1, optimizer in ("sgd", *_ADAMS), False),
        groups=1
        if rule == "adascale_memory" and optimizer == "adamax"
        else rng.choices((1, 2, 3), (3, 3, 2))[0],
        scheduler=scheduler,
        unit=maybe(0.3, "epoch", "step")
        if scheduler and client != "adascale"
        else "step",
        rule=rule,
        precision="fp32"
        if base_run
        else rng.choices(("fp32", "bf16", "fp16"), (8, 1, 1))[0],
        dtype=maybe(0.85, "float64", "float32"),
        clip=maybe(
            0.3,
            rng.choice((0.5, 2.0, 1e9, "1.2x" if run else 0.1, "0.9x" if run else 4.0)),
            None,
        ),
        poison=()
        if base_run
        # on the first or the last worker
        else tuple(
            (rng.randint(0, 6), rng.randint(0, 1) * max(legs[0].workers - 1, 1))
            for _ in range(rng.choice((0, 0, 0, 1, 2)))
        ),
        frozen=()
        if base_run
        else rng.choice(((),) * 9 + (span, (0, 2, 4, 6, 8), (1, 3, 5, 7))),
        hooked=maybe(0.15, rng.randint(0, 4), None) if not base_run else None,
        caught=maybe(0.2, (rng.randint(0, 4), rng.randint(0, 2)), None)
        if not base_run
        else None,
        window=rng.choice((0.05, 0.1, 0.3, 1.0)) if not base_run else 0.3,
        length=rng.randint(17, 61),
        seed=rng.randint(0, 10**6),
        drop_last=maybe(0.25, not bare, False),
        shuffle=maybe(0.9, True, False),
        measure_every=maybe(0.65, rng.choice((1, 2, 3)), None)
        if run or attached or more.get("effective")
        else None,
        quiet=0
        if kind == "merges"
        else maybe(0.4, rng.randint(0, 4), None)
        if kind == "norm"
        else None,
        looks=maybe(0.2, rng.randint(1, 3), None) if not base_run else None,
        **more,
    )


def draw(seed: str) -> Case:
    """Return the case of a seed."""
    case = _drawn(seed)
    # by a generator of its own: a new dimension leaves the others of a seed as they are
    rng = random.Random(f"{seed} more")
    refused = refusal(case)
    for change in _more(case, rng):
        changed = replace(case, **change)
        if allowed(changed) and refusal(changed) == refused and _sensible(changed):
            case = changed
    return case


def _more(case: Case, rng: random.Random) -> list[dict[str, Any]]:
    """Return changes of a case, each of which is made if it is allowed then."""
    total = case.legs[0].total
    drawn: list[tuple[float, dict[str, Any]]] = [
        (0.2, {"units": True}),
        (0.1, {"starting": rng.randint(1, max(total // 2, 1))}),
        (0.1, {"sampled": True}),
        (0.1, {"collated": True}),
        (0.2, {"followed": True}),
        (0.5, {"by_text": True}),
        (0.15, {"smoothed_by_scale": True}),
        (0.15, {"left_out": tuple(rng.sample(range(6), 2))}),
        (0.7, {"short": ((rng.randint(0, 2), 1), (rng.randint(3, 5), 1))}),
        (0.6, {"divided": True}),
        (0.1, {"rule": "cautious"}),
        (0.28, _growing(case, rng)),
        (0.5, {"told": rng.choice((0.75, 1.5))}),
        (0.5, {"ends": True}),
        (0.25, {"unhooked": rng.randint(0, 5)}),
        (0.3, {"by_epochs": rng.choice((0.0, 0.3, 0.8))}),
        (0.2, {"recipe": True}),
        (0.5, {"spike": rng.choice((rng.randint(0, 5), rng.randint(11, 25)))}),
        (0.5, {"patience": (rng.choice((1.0, 3.0)), rng.choice(("min", "max")))}),
        (0.2, {"legs": tuple(_elastic(leg, rng) for leg in case.legs)}),
    ]
    return [change for share, change in drawn if rng.random() < share]


def _elastic(leg: Leg, rng: random.Random) -> Leg:
    """Return a start whose passes may be too few for a base batch."""
    few = None if leg.per_worker is None else rng.randint(1, 2)
    return replace(leg, elastic=True, per_worker=few, passes=rng.randint(1, 2))


def _growing(case: Case, rng: random.Random) -> dict[str, Any]:
    """Return the changes with which k, the steps from one measurement to the next, grows
    in the run: T of 100·S and more, in a window of all of it.
    """
    legs = case.legs
    batches = [batch for _, batch in case.batches] or [batch_of(leg)[0] for leg in legs]
    scale = max(batches) / min(leg.base for leg in legs)
    longer = math.ceil(100 * min(scale, 3)) + rng.randint(0, 50)
    longer_legs = [replace(leg, total=leg.total + longer) for leg in legs]
    first = legs[0].steps
    longer_legs[0] = replace(longer_legs[0], steps=first and first + 60)
    return {
        "legs": tuple(longer_legs),
        "batches": tuple((15 * start, batch) for start, batch in case.batches),
        "window": 1.0,
        "measure_every": None,
        # in other runs the differences of rounding grow over some hundred steps
        "optimizer": "sgd",
        "precision": "fp32",
        "dtype": "float64",
    }


def _has_units(case: Case) -> bool:
    """Return whether each step has a unit."""
    step = position = 0
    position = case.starting * case.legs[0].base
    for leg in case.legs:
        for _ in range(leg.steps or 120):
            shape = shape_of(case, leg, step, 0.0, None)
            seen, position = examples_of(
                case, position, shape.batch, shape.workers, shape.passes
            )
            if not any(units_of(i) for own in seen for part in own for i in part):
                return False
            step += 1
    return True


def _drawn(seed: str) -> Case:
    """Return the case of a seed in the older dimensions."""
    rng = random.Random(seed)
    refused = rng.random() < 0.06
    while True:
        case = _any_case(rng)
        if case.precision != "fp32":
            case = replace(case, dtype="float32")
        # ten steps are measured before one may be clipped
        if isinstance(case.clip, str):
            case = replace(
                case,
                legs=tuple(replace(leg, total=leg.total + 30) for leg in case.legs),
            )
        if allowed(case) and (refusal(case) is not None) == refused and _sensible(case):
            return case


def _sensible(case: Case) -> bool:
    """Return whether the parts of the case that are drawn for certain steps and
    workers have an effect.
    """
    passes = min(batch_of(leg)[1] for leg in case.legs)
    return (
        all(count < passes for _, count in case.short)
        and not (case.short and case.changes)
        and sum(leg.steps or 0 for leg in case.legs)
        < (12 if case.legs[0].total < 100 else 99)
    )


def _share(x: float) -> str:
    return "1" if x == 1 else "whole" if x == int(x) else "other"


def values(case: Case) -> dict[str, str]:
    """Return a value of each dimension, for the table of pairs."""
    first, last = case.legs[0], case.legs[-1]
    batch, passes = batch_of(first)
    kinds = {"none"} if len(case.legs) == 1 else set()
    for a, b in zip(case.legs, case.legs[1:], strict=False):
        kinds.add(
            "workers"
            if a.workers != b.workers
            else "base"
            if a.base != b.base
            else "same"
        )
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
        **{
            f"{name} changes": str(was != now)
            for name, was, now in zip(
                ("B0", "T", "LR"), _fixed(first), _fixed(last), strict=True
            )
        },
        "optimizer": case.optimizer
        + "+m" * (case.momentum > 0)
        + "+n" * case.nesterov
        + "+d" * (case.dampening > 0),
        "decay": str(case.weight_decay > 0),
        "maximize": str(case.maximize),
        "fused": str(case.fused),
        "groups": str(case.groups),
        "scheduler": str(case.scheduler),
        "unit": case.unit,
        "rule": case.rule,
        "precision": case.dtype if case.precision == "fp32" else case.precision,
        "net": case.net,
        "clip": "multiple"
        if isinstance(case.clip, str)
        else str(case.clip is not None),
        "skipped": str(bool(case.poison)),
        "spike": str(case.spike is not None),
        "frozen": "no"
        if not case.frozen
        else "in turn"
        if case.frozen[1:2] == (case.frozen[0] + 2,)
        else "once",
        "hooked": str(case.hooked is not None),
        "caught": str(case.caught is not None),
        "drop_last": str(case.drop_last),
        "shuffle": str(case.shuffle),
        "averages": "effective"
        if case.client in ("run", "attach") or case.effective
        else "θ"
        if case.smoothing is not None
        else "n",
        "debias": str(case.debias),
        "measured": "grows" if last.total > 100 else str(case.measure_every),
        "clipped": "samples"
        if case.client == "adascale" and case.clip_samples
        else "averages",
        "single gain": str(case.client != "adascale" or case.single_gain),
        "scaled loss": str(case.scaled_loss),
        "passes change": "changed"
        if case.changes
        else "short"
        if case.short
        else "S"
        if case.rescaled
        else "no",
        "added": str(case.added is not None),
        "via": case.via if len(case.legs) > 1 else "none",
        "batch": "schedule"
        if case.batches
        else "noise"
        if case.efficiency
        else "iterable"
        if case.iterable
        else "fixed",
        "loaders": str(case.loaders),
        "evaluate": str(case.evaluate is not None),
        "bare model": str(case.bare_model),
        "quiet": "no"
        if case.quiet is None
        else "at first"
        if case.quiet == 0
        else "later",
        "looks": str(case.looks is not None),
        "weights": "units" if case.units else "examples",
        "starting": str(case.starting > 0),
        "order": "sampler" if case.sampled else "seed",
        "collated": str(case.collated),
        "followed": str(case.followed),
        "left out": str(bool(case.left_out)),
        "divided": str(case.divided),
        "told S": str(case.told),
        "short by": "none"
        if not case.short
        else "step_end"
        if case.ends
        else "expect_passes",
        "unhooked": str(case.unhooked is not None),
        "T": "epochs" if case.by_epochs is not None else "steps",
        "patience": "none" if case.patience is None else case.patience[1],
        "recipe": str(case.recipe),
        "elastic": str(any(leg.elastic for leg in case.legs)),
        "θ by S": str(case.smoothed_by_scale),
    }


def smaller(case: Case) -> list[Case]:
    """Return cases that are simpler in one place each, the largest simplification
    first.
    """
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
        for name, value in {
            "workers": 1,
            "passes": 1,
            "sharding": "none",
            "elastic": False,
            "accept": True,
            "batch": None,
            "lr": 1.0,
        }.items():
            if getattr(leg, name) != value:
                changed = replace(
                    leg,
                    **{name: value},
                    **({"per_worker": 4} if name == "batch" else {}),
                )
                out.append(
                    replace(case, legs=(*case.legs[:i], changed, *case.legs[i + 1 :]))
                )
        if leg.workers > 2:
            out.append(
                replace(
                    case,
                    legs=(*case.legs[:i], replace(leg, workers=2), *case.legs[i + 1 :]),
                )
            )
        if i and (leg.base, leg.total) != (case.legs[0].base, case.legs[0].total):
            same = replace(leg, base=case.legs[0].base, total=case.legs[0].total)
            out.append(replace(case, legs=(*case.legs[:i], same, *case.legs[i + 1 :])))
    return out
