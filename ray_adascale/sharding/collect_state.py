"""Collecting the full optimizer state from the shares of all workers, one tensor at
a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import as_bytes, global_rank
from .buckets import Fragment
from .share_state import ShareState, copy_of, describe_entry, place_for

EVERYONE = -1
"""Recipient rank that stands for all workers."""


def collect_state(
    share: ShareState,
    params: Sequence[Tensor],
    fragments: Sequence[Fragment],
    group: dist.ProcessGroup | None,
    rank: int,
    world_size: int,
    *,
    recipient: int,
) -> dict[Any, Any] | None:
    """Return the full state on the recipient, by number as in a state dict; None on the
    other workers. Collective.

    Peaks at one full copy on the recipient, and at one entry more than its share
    elsewhere.

    Args:
        share: State of this worker's share.
        params: All parameters.
        fragments: This worker's.
        group: Workers that hold the shares.
        rank: This worker.
        world_size: Number of workers.
        recipient: Rank of the recipient, or :data:`EVERYONE`.

    Raises:
        ValueError: ``recipient`` is out of its range.
    """
    if not EVERYONE <= recipient < world_size:
        raise ValueError(
            f"Invalid recipient_rank={recipient}. Must be one of the {world_size} "
            "ranks in the process group, or -1 for all."
        )
    place = {p: i for i, p in enumerate(params)}
    mine = [
        (place[f.param], f.start, f.numel, name, *describe_entry(value, f))
        for f in fragments
        if f.tensor in share
        for name, value in share[f.tensor].items()
    ]
    everyone: list[Any] = [mine] * world_size
    # pickled: the workers of a group run one program and trust each other
    if world_size > 1:
        dist.all_gather_object(everyone, mine, group=group)
    receives = recipient in (rank, EVERYONE)
    states: dict[Any, Any] = {}
    held = {place[f.param]: f for f in fragments}
    sent: set[tuple[int, Any]] = set()
    for owner, entries in enumerate(everyone):
        for i, start, numel, name, kind, payload in entries:
            if kind != "part" and (i, name) in sent:
                continue  # another owner's copy of a scalar, such as Adam's step
            sent.add((i, name))
            state = states.setdefault(i, {})
            if kind == "value":
                state[name] = payload
                continue
            source = share[held[i].tensor][name].detach() if owner == rank else None
            if receives:
                into = place_for(state, name, kind, payload, params[i], start, numel)
            else:
                into = None
            if owner == recipient or world_size == 1:
                if source is not None and into is not None:
                    into.copy_(source)
            elif source is not None or into is not None:
                _move(owner, recipient, source, into, payload, group)
    if not receives:
        return None
    states.update(
        {k: copy_of(v) for k, v in share.items() if not isinstance(k, Tensor)}
    )
    return states


def _move(
    owner: int,
    recipient: int,
    source: Tensor | None,
    into: Tensor | None,
    payload: list[Any],
    group: dist.ProcessGroup | None,
) -> None:
    """Send one tensor, or part of it, from its owner to another worker or to all."""
    shape = payload[0]
    dtype = getattr(torch, payload[1])
    backends = dist.get_backend_config(group)
    cpu = "nccl" not in backends or "gloo" in backends
    if cpu:
        device = torch.device("cpu")
    else:
        device = torch.device("cuda", torch.cuda.current_device())
    if source is None:
        carrier = torch.empty(shape, dtype=dtype, device=device)
    else:
        carrier = source.to(device).contiguous()
    if carrier.numel():
        data = as_bytes(carrier.view(-1))
        if recipient == EVERYONE:
            dist.broadcast(data, global_rank(group, owner), group=group)
        elif source is not None:
            dist.send(data, global_rank(group, recipient), group=group)
        else:
            dist.recv(data, global_rank(group, owner), group=group)
    if into is not None:
        into.copy_(carrier)
