"""``fully_shard`` (FSDP2): each worker has its shard of weights and gradients
(``sharding="fsdp2"``).

Importing this module takes most of a second, for DTensor, so it is imported where a
model is sharded, or is to be.

FSDP2 keeps two tensors for each parameter: the shard, a ``DTensor`` that the optimizer
steps, and the whole parameter, which the module uses while it is unsharded. Autograd
accumulates into the whole one; FSDP2 then copies the gradients of a module into one
buffer, reduces and scatters it, and writes the shard's ``.grad``. So

- a gradient sample's norm ``‖g_i‖²`` is taken by a hook on each *whole* parameter, as
  under DDP;
- the reduced gradient's norm ``‖ḡ‖²`` is the sum over workers of the norms of their
  shards.

Why not in a custom reduce-scatter (``FSDPModule.set_custom_reduce_scatter``), where the
local gradients are at hand too: its input is one buffer without names, so there would
be no norm per parameter group; padded, in the reduction's dtype, and for some dtypes
divided already; accumulated over the passes without communication
(``set_requires_gradient_sync(False)``), where each pass's own norm is needed; it is not
called at all for a mesh of one worker; and it would displace a reduce-scatter of the
user's (``set_symm_mem_for_comm``). The hooks see one pass's gradient of one parameter,
before all of that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..._torch import is_dtensor, local_part, without_gradients
from ..._warn import warn_on_first_worker
from ...measure.autograd import is_hooked
from ...measure.identity import LENGTH, project, total
from ...measure.norms import take_group_norms
from ...measure.observers import GradientObserver, HookObserver, PassListener
from ..buckets import Fragment
from ..collectives import send_from_first
from .sharding import Sharding, Wanted, finite_everywhere


class FullyShard(Sharding):
    """Gradients that FSDP2 reduces to the shards, as DTensors."""

    copies = False
    sharded = True
    fuses = False

    def __init__(self, optimizer: Optimizer, model: nn.Module | None) -> None:
        super().__init__(optimizer, model)
        self._buffers: list[str] = []
        self._step_begins = True

    # ---- parameters ------------------------------------------------------------------

    def local(self, tensor: Tensor) -> Tensor:
        return local_part(tensor)

    # ---- before the first step -------------------------------------------------------

    def check(self) -> None:
        if self.model is None:
            raise ValueError(
                "The optimizer's parameters are DTensors. Give AdaScale(..., "
                "model=model), the model that fully_shard was applied to: gradient "
                "samples are measured on its unsharded parameters."
            )

    def observe(self, listener: PassListener, wanted: Wanted) -> GradientObserver:
        if wanted.precondition is not None:
            raise ValueError(
                "precondition= needs whole parameters and their optimizer state, which "
                "fully_shard splits over workers. Leave it out, or train with "
                "DistributedDataParallel."
            )
        assert self.model is not None
        return FSDP2Observer(
            self.groups,
            listener,
            model=self.model,
            world_size=wanted.workers,
            local=wanted.local,
        )

    def drive(self, module: nn.Module) -> None:
        saved = {id(value) for value in module.state_dict(keep_vars=True).values()}
        self._module = module
        self._buffers = [
            name for name, buffer in module.named_buffers() if id(buffer) in saved
        ]

    # ---- a pass ----------------------------------------------------------------------

    def begin_pass(self, *, last: bool) -> None:
        model = cast(FSDPModule, self.model)
        model.set_requires_gradient_sync(last)
        if self._step_begins:
            # an evaluation in the loop leaves it whole, and an optimizer's eval()
            # changes its shards
            model.reshard()
            # As DistributedDataParallel does, but without buffers that no checkpoint
            # has, such as masks.
            send_from_first([self._module.get_buffer(name) for name in self._buffers])
        self._step_begins = last

    # ---- the gradients of the step ---------------------------------------------------

    def numbers(self) -> list[Tensor]:
        return [
            local_part(grad.detach()) for grad in self.gradients() if grad is not None
        ]

    @without_gradients
    def finite(self, group: dist.ProcessGroup | None, *, several: bool) -> Tensor:
        check = super().finite(group, several=several)  # of this worker's shards
        return finite_everywhere(check, group) if several else check

    # ---- a checkpoint ----------------------------------------------------------------

    def fragments(self) -> list[Fragment]:
        """Return this worker's parts, which are ranges of rows."""
        return [Fragment(p, 0, *_rows(p), p, 0) for p in self.params]


def _rows(param: Tensor) -> tuple[int, int]:
    """Return (first element, elements) of this worker's part of a parameter."""
    if not is_dtensor(param):
        return 0, param.numel()
    if list(param.placements) != [Shard(0)]:
        raise TypeError(
            f"Can't checkpoint optimizer state placed as {list(param.placements)}: "
            "only fully_shard's own placement is supported, rows over a mesh of one "
            "dimension."
        )
    return first_element(param), param.to_local().numel()


# ---- the norms -----------------------------------------------------------------------


class FSDP2Observer(HookObserver):
    """Hooks on the whole parameters of FSDP2 modules, set in the forward pass that
    first unshards them.

    FSDP2 makes a whole parameter at the first all-gather and keeps the tensor from then
    on; should it make another, or the parameter be unfrozen, the next forward pass
    hooks that. Gradients may be reduced in each pass or in the last one only
    (``set_requires_gradient_sync``, ``set_requires_all_reduce``), but they must be in
    the last. One- and two-dimensional meshes (HSDP), uneven and ``Shard(i)``
    placements, mixed precision and several parameter groups are supported.

    Args:
        groups: Parameters of each parameter group.
        listener: Called as passes begin and end.
        model: The model, or a module that contains it; its ``fully_shard``-ed modules
            hold the parameters.
        world_size: Workers that share the batch: exactly those of the mesh.
        local: Take the norm of each gradient sample. False where only the end of the
            pass matters.

    Raises:
        ValueError: A parameter is in no FSDP2 module of ``model``, or its placement is
            not FSDP2's alone (tensor parallelism), or its gradient would not be reduced
            (``ignored_params``), or the mesh has another size.
    """

    sharded = True

    def __init__(
        self,
        groups: Sequence[Sequence[Tensor]],
        listener: PassListener,
        *,
        model: nn.Module,
        world_size: int,
        local: bool = True,
    ) -> None:
        self._model = model
        self._world_size = world_size
        # the whole parameter that is hooked, by shard
        self._whole: dict[Tensor, Tensor] = {}
        # shards with a gradient that was not yet reduced
        self._owed: set[Tensor] = set()
        self._pre_forward: list[RemovableHandle] = []
        self._reductions: list[RemovableHandle] = []
        super().__init__(groups, listener, local=local)

    def hook_all(self) -> None:
        """Let each module's forward pass hook the parameters that it unshards. These
        hooks run after FSDP2's.
        """
        watched = {p for params in self.groups for p in params}
        self._sites: dict[nn.Module, list[tuple[nn.Module, str, Tensor]]] = {
            module: [site for site in _sites(module) if site[2] in watched]
            for module in self._model.modules()
            if isinstance(module, FSDPModule)
        }
        found = {shard for sites in self._sites.values() for _, _, shard in sites}
        for param in watched:
            self._check(param, param in found)
        ref = weakref.ref(self)

        @torch.compiler.disable(
            reason="hooks on whole parameters are set outside of the graph, as FSDP2's "
            "are"
        )
        def pre_forward(module: nn.Module, args: Any) -> None:
            observer = ref()
            if observer is not None and torch.is_grad_enabled():
                observer._hook_module(module)

        for module, sites in self._sites.items():
            if sites:
                self._pre_forward.append(module.register_forward_pre_hook(pre_forward))

    def _check(self, param: Tensor, found: bool) -> None:
        if not isinstance(param, DTensor):
            if param.requires_grad:
                raise ValueError(_NOT_SHARDED.format(shape=tuple(param.shape)))
            return
        *outer, last = param.placements
        if (
            type(last) is not Shard
            or len(outer) > 1
            or any(type(placement) is not Replicate for placement in outer)
        ):
            raise ValueError(
                f"A parameter of shape {tuple(param.shape)} is placed as "
                f"{param.placements}. AdaScale supports (Shard,) and, for HSDP, "
                "(Replicate, Shard): fully_shard alone, without tensor, expert or "
                "pipeline parallelism."
            )
        if param.device_mesh.size() != self._world_size:
            raise ValueError(
                f"A parameter of shape {tuple(param.shape)} is sharded over "
                f"{param.device_mesh.size()} workers, but AdaScale has "
                f"world_size={self._world_size}. Every worker of the batch must be on "
                "the mesh: give fully_shard the whole mesh, or AdaScale the mesh's "
                "process group."
            )
        if not found:
            raise ValueError(
                f"A parameter of shape {tuple(param.shape)} was not found in a "
                "fully_shard-ed module of model=. Give AdaScale the model whose "
                "parameters() you gave the optimizer."
            )

    # ---- hooks -----------------------------------------------------------------------

    def _hook_module(self, module: nn.Module) -> None:
        """Hook the parameters of an unsharded module that have no hook yet."""
        for owner, name, shard in self._sites[module]:
            whole = getattr(owner, name)
            if (
                whole is self._whole.get(shard)
                or whole is shard
                or not whole.requires_grad
            ):
                continue
            if isinstance(whole, DTensor):
                raise ValueError(
                    f"The parameter {name!r} of a {type(owner).__name__} is a DTensor "
                    "even while it is unsharded; AdaScale supports fully_shard alone, "
                    "without tensor parallelism."
                )
            if shard not in self._whole:
                self._reductions.append(
                    shard.register_post_accumulate_grad_hook(self._owed.discard)
                )
            self.hook(shard, whole)
            self._whole[shard] = whole
        reduced_in = {
            group.mp_policy.reduce_dtype for group in _param_groups(module)
        } - {None}
        self.identity.half |= any(dtype.itemsize < 4 for dtype in reduced_in)

    def slot(self, param: Tensor) -> None:
        return None  # its taker does more than to take norms

    def taker(self, param: Tensor) -> Callable[[Tensor], object]:
        owed = self._owed
        take_sample = super().taker(param)

        def take(grad: Tensor) -> None:
            owed.add(param)
            take_sample(grad)

        return take

    def local_sq_norms(self) -> Tensor:
        self.samples.flush()
        # FSDP2 reduces to Σ g_i / f, f = N unless set. In terms of a mean over N
        # workers, each local gradient is N/f · g_i.
        for shards, multiple in self._multiples():
            if multiple != 1:
                for shard in shards:
                    self.samples.multiply(shard, multiple)
        return super().local_sq_norms()

    def _multiples(self) -> Iterator[tuple[Iterable[Tensor], float]]:
        """Yield, of each module, its shards and N/f: their gradients are the mean
        over workers times this.
        """
        for module, sites in self._sites.items():
            if sites:
                factor = _divide_factor(module) or self._world_size
                yield (
                    dict.fromkeys(shard for _, _, shard in sites),
                    self._world_size / factor,
                )

    def detach(self) -> None:
        super().detach()
        self._whole.clear()
        for handles in (self._pre_forward, self._reductions):
            for handle in handles:
                handle.remove()
            handles.clear()

    # ---- the reduced gradient --------------------------------------------------------

    @torch.no_grad()
    def reduced_sq_norms(self) -> Tensor:
        if self._owed:
            self._owed.clear()
            raise RuntimeError(_NOT_REDUCED)
        shards: list[tuple[int, Tensor]] = []
        for param in (p for params in self.groups for p in params):
            if param.grad is None:
                continue
            if not isinstance(param, DTensor):
                # unfrozen since
                raise RuntimeError(_NOT_SHARDED.format(shape=tuple(param.shape)))
            if _counts(param):
                shards.append(
                    (self._group_of[param], cast(DTensor, param.grad).to_local())
                )
        return self._sums(take_group_norms(shards))

    def find_unseen(self) -> list[Tensor]:
        """Return the parameters whose module's forward was never called. Hook them,
        so that the next step measures them.
        """
        params = [p for params in self.groups for p in params if p.grad is not None]
        late = [p for p in params if p not in self._whole]
        if late:
            self._hook_late(set(late))
        return late

    def has_product(self, param: Tensor) -> bool:
        # a part is a range of elements
        return isinstance(param, DTensor) and param.placements[-1].is_shard(0)

    @torch.no_grad()
    def reduced_product(self) -> Tensor:
        products = []
        for shards, multiple in self._multiples():
            for shard in shards:
                if (
                    shard.grad is None
                    or not self.has_product(shard)
                    or not _counts(cast(DTensor, shard))
                ):
                    continue
                if (start := first_element(cast(DTensor, shard))) < LENGTH:
                    products.append(
                        project(cast(DTensor, shard.grad).to_local(), start) / multiple
                    )
        return total(products, self.device)

    def _hook_late(self, late: set[Tensor]) -> None:
        """Hook parameters whose module's forward was never called
        (``register_fsdp_forward_method``, ``unshard()``).

        Collective, as FSDP2's reduction of their gradients was; this step is not
        complete, the next one is.
        """
        for module, sites in self._sites.items():
            if any(shard in late for _, _, shard in sites):
                fsdp = cast(FSDPModule, module)
                fsdp.unshard()
                self._hook_module(module)
                fsdp.reshard()


_NOT_SHARDED = (
    "A plain parameter of shape {shape} is in the optimizer beside the sharded ones "
    "(ignored_params of fully_shard?): FSDP2 does not reduce its gradient, so workers "
    "would drift apart. Shard it too, freeze it, or step it with an optimizer of its "
    "own that AdaScale does not wrap."
)
_NOT_REDUCED = (
    "The last backward pass of the step left gradients unreduced. Call "
    "model.set_requires_gradient_sync(True), and set_requires_all_reduce(True) with "
    "HSDP, before the last of num_gradients_to_accumulate passes."
)


def _sites(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield (owner, name, shard) of each parameter below ``module``, without those
    of FSDP2 modules inside it.
    """
    # an evaluation leaves the root unsharded; the optimizer's are the shards
    cast(FSDPModule, module).reshard()
    stack = [module]
    while stack:
        owner = stack.pop()
        for name, param in owner.named_parameters(
            recurse=False, remove_duplicate=False
        ):
            yield owner, name, param
        stack.extend(
            child for child in owner.children() if not isinstance(child, FSDPModule)
        )


def _divide_factor(module: nn.Module) -> float | None:
    """Return the factor that ``set_gradient_divide_factor`` set last; None for the
    mean. torch has the setter only.
    """
    factors = {group.gradient_divide_factor for group in _param_groups(module)}
    return factors.pop() if factors else None


def _param_groups(module: nn.Module) -> list[Any]:
    """Return FSDP2's records of the parameters that it gathers together at this
    module; private to torch.
    """
    state = cast(Any, module)._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    # torch 2.11
    return [group for group in (state._fsdp_param_group,) if group is not None]


def first_element(param: DTensor) -> int:
    """Return the first element of this worker's rows. They are divided as by
    ``torch.chunk``.
    """
    rows = -(-param.shape[0] // param.device_mesh.size(-1))
    return (
        min(param.device_mesh.get_local_rank(-1) * rows, param.shape[0])
        * param.shape[1:].numel()
    )


def _counts(param: DTensor) -> bool:
    """Whether this worker's shard is counted: of the equal replicas of HSDP only the
    first is.
    """
    return param.device_mesh.ndim == 1 or param.device_mesh.get_local_rank(0) == 0


# ---- sharding a model ----------------------------------------------------------------

# Smallest number of elements of a block that is gathered by itself: smaller ones are
# not worth a message of their own.
_BLOCK_NUMEL = 1 << 20


def shard_model(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> None:
    """Apply ``fully_shard`` to a plain model over all workers, and give its optimizer
    the shards. Collective.

    Every large element of a ``ModuleList`` or ``Sequential`` is gathered by itself, the
    rest with the root. All workers start with rank 0's values. A model to which
    ``fully_shard`` was applied already is left unchanged.

    Raises:
        ValueError: The optimizer has state already.
    """
    if isinstance(model, FSDPModule):
        return
    if any(optimizer.state.values()):
        raise ValueError(
            "The optimizer has state already. Shard the model before its first step, "
            "or fully_shard it."
        )
    # schedule-free optimizers make empty entries, which would keep the whole parameters
    optimizer.state.clear()
    names = {param: name for name, param in model.named_parameters()}
    if hooked := [name for param, name in names.items() if is_hooked(param)]:
        warn_on_first_worker(
            f"fully_shard makes new parameters, and the hooks on {hooked[0]} (one of "
            f"{len(hooked)}) are lost with the old one. "
            'sharding="zero2" keeps hooks on parameters.'
        )
    # one by one: together they would need the memory twice
    for tensor in [*model.parameters(), *model.buffers()]:
        send_from_first([tensor])
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for container in reversed(list(model.modules())):  # the innermost first
        for block in (
            container.children()
            if isinstance(container, nn.ModuleList | nn.Sequential)
            else ()
        ):
            large = sum(p.numel() for p in block.parameters()) >= _BLOCK_NUMEL
            if large and not isinstance(block, FSDPModule | nn.ModuleList):
                fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sharded = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [sharded[names[param]] for param in group["params"]]
