"""Memory that a parameter shares with another tensor of the model: weights tied by
storage, buffers that view a weight.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ray_adascale import OSS, AdaScaleConfig, Run
from ray_adascale.sharding.shared_memory import shared_with_parameters

from .against_ddp import Pool

SHARDINGS = ["oss", "zero2", "fsdp2"]


class Words(nn.Module):
    """An embedding and a head of the same shape."""

    def __init__(self, change: Callable[[Words], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(8, 8)
        self.head = nn.Linear(8, 8, bias=False)
        change(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


def one_parameter(model: Words) -> None:
    model.head.weight = model.embed.weight


def tied(model: Words) -> None:
    model.head.weight = nn.Parameter(model.embed.weight)


def tied_transposed(model: Words) -> None:
    model.head.weight = nn.Parameter(model.embed.weight.data.t())


def tied_in_part(model: Words) -> None:
    numbers = torch.randn(127)
    model.embed.weight = nn.Parameter(numbers[:64].view(8, 8))
    model.head.weight = nn.Parameter(numbers[63:].view(8, 8))


def tied_and_frozen(model: Words) -> None:
    model.head.weight = nn.Parameter(model.embed.weight, requires_grad=False)


def rows_as_buffer(model: Words) -> None:
    model.register_buffer("rows", model.embed.weight.detach()[2:7:2])


def bytes_as_buffer(model: Words) -> None:
    model.register_buffer("bytes", model.embed.weight.data.view(torch.uint8))


def attribute(model: Words) -> None:
    model.flat = model.embed.weight.data.view(-1)


def parameter_of_a_buffer(model: Words) -> None:
    model.register_buffer("store", torch.randn(100))
    model.embed.weight = nn.Parameter(model.store[30:94].view(8, 8))


def two_halves(model: Words) -> None:
    numbers = torch.randn(128)
    model.embed.weight = nn.Parameter(numbers[:64].view(8, 8))
    model.head.weight = nn.Parameter(numbers[64:].view(8, 8))


def columns(model: Words) -> None:
    matrix = torch.randn(8, 16)
    model.embed.weight = nn.Parameter(matrix[:, :8])
    model.head.weight = nn.Parameter(matrix[:, 8:])


def two_buffers(model: Words) -> None:
    model.register_buffer("a", torch.randn(8))
    model.register_buffer("b", model.a[:3])


def spectral_norm(model: Words) -> None:
    nn.utils.spectral_norm(model.head)


SHARED = {
    tied: ("embed.weight", "head.weight"),
    tied_transposed: ("embed.weight", "head.weight"),
    tied_in_part: ("embed.weight", "head.weight"),
    tied_and_frozen: ("embed.weight", "head.weight"),
    rows_as_buffer: ("embed.weight", "rows"),
    bytes_as_buffer: ("bytes", "embed.weight"),
    attribute: ("flat", "embed.weight"),
    parameter_of_a_buffer: ("store", "embed.weight"),
}
APART = [one_parameter, two_halves, columns, two_buffers, spectral_norm]


def sgd(model: nn.Module) -> torch.optim.SGD:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("change", [*SHARED, *APART])
def test_tensors_that_share_memory_with_a_parameter(change: Any) -> None:
    model = Words(change)
    found = shared_with_parameters(model, sgd(model))
    assert (found and sorted(found)) == (
        sorted(SHARED[change]) if change in SHARED else None
    )


# ---- a run ---------------------------------------------------------------------------


def _trained(change: Any, sharding: str) -> list[Tensor]:
    """The model's parameters and buffers after four steps."""
    model = Words(change)
    tokens = torch.randint(8, (64,), generator=torch.Generator().manual_seed(0))
    config = AdaScaleConfig(
        base_batch_size=8, total_steps=4, global_batch_size=8, sharding=sharding
    )
    run = Run(model, sgd(model), None, TensorDataset(tokens), config)
    for (x,) in run:
        run.backward(F.cross_entropy(run.model(x), x))
        run.step()
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers())]


def _trained_by_default(change: Any) -> tuple[list[Tensor], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = _trained(change, "auto")
    told = [str(warning.message) for warning in caught]
    return found, [text for text in told if "share memory" in text]


@pytest.mark.parametrize("change", [*SHARED, *APART[:4]])
def test_the_default_keeps_shared_memory(pool: Pool, change: Any) -> None:
    alone = _trained(change, "none")
    results = pool(2).run(_trained_by_default, change)
    for found, _ in results:
        if change is not bytes_as_buffer:  # of numbers that are rounded otherwise
            torch.testing.assert_close(found, alone)
    (told,) = [told for _, told in results if told] or [[]]
    assert bool(told) == (change in SHARED)
    for name in SHARED.get(change, ()):
        assert f"{name!r}" in told[0]


def _refused(change: Any, sharding: str) -> str:
    with pytest.raises(ValueError, match="share memory") as caught:
        _trained(change, sharding)
    return str(caught.value)


@pytest.mark.parametrize("change", SHARED)
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_sharding_that_would_part_memory_is_refused(
    pool: Pool, sharding: str, change: Any
) -> None:
    for error in pool(2).run(_refused, change, sharding):
        assert all(f"{name!r}" in error for name in SHARED[change])
        assert "head.weight = embed.weight, without nn.Parameter" in error


# ---- an OSS --------------------------------------------------------------------------


def _oss_of_tied_weights() -> str:
    with pytest.raises(ValueError, match="share memory") as caught:
        OSS(Words(tied).parameters(), lr=0.1)
    return str(caught.value)


def test_an_oss_names_tied_weights_by_number(pool: Pool) -> None:
    for error in pool(2).run(_oss_of_tied_weights):
        assert "number 0 (8, 8) and number 1 (8, 8)" in error


def test_an_expanded_parameter_is_refused() -> None:
    expanded = nn.Parameter(torch.ones(1, 8).expand(8, 8))
    with pytest.raises(ValueError, match=r"one number in memory.*clone"):
        OSS([expanded], lr=0.1)


# ---- what is saved -------------------------------------------------------------------


def _bytes_saved(sharding: str) -> tuple[int, int]:
    """The bytes of a saved head, as it is and copied."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))
    data = TensorDataset(torch.ones(16, 64), torch.ones(16, 2))
    config = AdaScaleConfig(
        base_batch_size=4, total_steps=2, global_batch_size=4, sharding=sharding
    )
    run = Run(model, sgd(model), None, data, config)
    for x, y in run:
        run.backward(F.mse_loss(run.model(x), y))
        run.step()
    state = run.module[1].state_dict()
    places = {p.untyped_storage().data_ptr() for p in run.module.parameters()}
    assert len(places) == 4  # safetensors refuses tensors with one storage
    sizes = []
    for saved in (state, {key: value.clone() for key, value in state.items()}):
        file = io.BytesIO()
        torch.save(saved, file)
        sizes.append(file.tell())
    return sizes[0], sizes[1]


@pytest.mark.parametrize("sharding", ["none", "oss", "zero2"])
def test_a_part_of_the_model_is_saved_without_the_rest(
    pool: Pool, sharding: str
) -> None:
    for size, of_copies in pool(2).run(_bytes_saved, sharding):
        assert size <= of_copies + 128  # alignment
