"""OptimizerChain: against the plain optimizers stepped one after the other, and as a
torch.optim.Optimizer.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

from ray_adascale import OSS, AdaScale, AdaScaleMemoryRule, BetaRule, OptimizerChain
from ray_adascale.run.base.base_run import Momentum, momentum_of
from ray_adascale.sharding.partition import has_state

from .uneven import assert_same


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)
    )


def members(model: nn.Sequential) -> tuple[Muon, AdamW]:
    """Muon for the middle matrix and the first one, AdamW for the rest in two
    groups.
    """
    muon = Muon([model[2].weight, model[0].weight], lr=0.02)
    rest = [
        {"params": [model[0].bias, model[2].bias]},
        {"params": model[4].parameters(), "lr": 0.03},
    ]
    return muon, AdamW(rest, lr=0.01)


def make(model: nn.Sequential) -> OptimizerChain:
    return OptimizerChain(members(model))


def batches(first: int, last: int, size: int = 16) -> list[Tensor]:
    return [
        torch.randn(size, 6, generator=torch.Generator().manual_seed(i))
        for i in range(first, last)
    ]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x[:, :2].sin()).square().mean()


def train(
    model: nn.Module,
    optimizers: list[Any],
    data: list[Tensor],
    schedulers: tuple[Any, ...] = (),
) -> None:
    for x in data:
        loss_of(model, x).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


# ---- the same steps as those of the optimizers ---------------------------------------


def test_groups_are_the_optimizers_own_and_schedulers_of_one_act() -> None:
    model = make_model()
    muon, adamw = members(model)
    chain = OptimizerChain(iter([muon, adamw]))
    assert chain.optimizers == (muon, adamw)
    assert [id(g) for g in chain.param_groups] == [
        id(g) for g in [*muon.param_groups, *adamw.param_groups]
    ]
    assert chain.parts() == [(muon, [0]), (adamw, [1, 2])]
    LambdaLR(muon, lambda t: 0.5)
    LambdaLR(chain, lambda t: 0.1)
    assert [g["lr"] for g in chain.param_groups] == pytest.approx([0.002, 0.001, 0.003])
    chain.param_groups[2]["lr"] = 7.0
    assert adamw.param_groups[1]["lr"] == 7.0


def test_a_closure_is_evaluated_once() -> None:
    ours, theirs = make_model(), make_model()
    (x,) = batches(0, 1)
    chain = make(ours)
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        chain.zero_grad()
        loss = loss_of(ours, x)
        loss.backward()
        return loss

    loss = chain.step(closure)
    assert calls == 1
    assert loss == loss_of(theirs, x)
    train(theirs, list(members(theirs)), [x])
    assert torch.equal(weights(ours), weights(theirs))


def test_gradients_are_cleared_as_by_the_optimizers() -> None:
    model = make_model()
    chain = make(model)
    loss_of(model, batches(0, 1)[0]).backward()
    chain.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    chain.zero_grad()
    assert all(p.grad is None for p in model.parameters())


# ---- state ---------------------------------------------------------------------------


def test_the_state_dict_is_that_of_one_optimizer_and_goes_on_to_the_last_bit() -> None:
    model = make_model()
    chain = make(model)
    train(model, [chain], batches(0, 5))
    chain.param_groups[1]["lr"] = 0.005
    saved = chain.state_dict()
    assert [g["params"] for g in saved["param_groups"]] == [[0, 1], [2, 3], [4, 5]]
    assert [set(saved["state"][i]) for i in (0, 1)] == [{"momentum_buffer"}] * 2
    assert all(
        set(saved["state"][i]) == {"step", "exp_avg", "exp_avg_sq"} for i in range(2, 6)
    )
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    before = copy.deepcopy(saved)

    other = make_model()
    other.load_state_dict(model.state_dict())
    muon, adamw = members(other)
    loaded = OptimizerChain([muon, adamw])
    loaded.load_state_dict(saved)
    assert_same(saved, before)
    train(model, [chain], batches(5, 9))
    train(other, [loaded], batches(5, 9))
    assert torch.equal(weights(model), weights(other))
    # The optimizers themselves were loaded.
    assert adamw.param_groups[0]["lr"] == 0.005
    assert list(muon.state) == [other[2].weight, other[0].weight]


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))]
)
def test_a_copy_is_independent_and_goes_on_alike(copied: Callable[[Any], Any]) -> None:
    model = make_model()
    chain = make(model)
    train(model, [chain], batches(0, 5))
    other, twin = copied((model, chain))
    train(model, [chain], batches(5, 9))
    assert not torch.equal(weights(model), weights(other))
    train(other, [twin], batches(5, 9))
    assert torch.equal(weights(model), weights(other))


def test_the_state_is_one_mapping_by_parameter() -> None:
    model = make_model()
    muon, adamw = members(model)
    chain = OptimizerChain([muon, adamw])
    matrix, bias = model[2].weight, model[4].bias
    assert not chain.state
    assert chain.state.get(matrix) is None
    assert not muon.state  # a look makes no entry
    train(model, [chain], batches(0, 1))
    assert len(chain.state) == 6
    assert set(chain.state) == set(model.parameters())
    assert chain.state[matrix] is muon.state[matrix]
    assert chain.state[bias] is adamw.state[bias]
    assert matrix in chain.state
    del chain.state[matrix]
    assert matrix not in muon.state
    # a new entry goes to the parameter's optimizer
    chain.state[matrix]["momentum_buffer"] = torch.zeros(8, 8)
    assert set(muon.state[matrix]) == {"momentum_buffer"}
    chain.state[bias] = {}
    assert adamw.state[bias] == {}
    with pytest.raises(KeyError):
        chain.state[torch.zeros(1)]


def test_state_of_other_groups_is_refused() -> None:
    saved = make(make_model()).state_dict()
    other = make_model()
    chain = OptimizerChain(
        [Muon([other[2].weight]), AdamW([other[4].bias, other[2].bias])]
    )
    with pytest.raises(
        ValueError, match=r"groups of \[2, 2, 2\] parameters, the optimizer of \[1, 2\]"
    ):
        chain.load_state_dict(saved)
    with pytest.raises(ValueError, match=r"Invalid param_groups: 1 groups\. .* have 2"):
        chain.param_groups = [{"params": []}]


def test_hooks_of_the_chain_and_of_its_optimizers_are_called() -> None:
    model = make_model()
    muon, adamw = members(model)
    chain = OptimizerChain([muon, adamw])
    calls: list[str] = []
    for name, optimizer in (("chain", chain), ("muon", muon)):
        optimizer.register_step_pre_hook(
            lambda o, a, k, name=name: calls.append(f"{name} before step")
        )
        optimizer.register_step_post_hook(
            lambda o, a, k, name=name: calls.append(f"{name} after step")
        )
        optimizer.register_load_state_dict_pre_hook(
            lambda o, s, name=name: calls.append(f"{name} before load")
        )
        optimizer.register_load_state_dict_post_hook(
            lambda o, name=name: calls.append(f"{name} after load")
        )
    chain.register_state_dict_pre_hook(lambda o: calls.append("before state"))
    chain.register_state_dict_post_hook(lambda o, s: {**s, "mark": True})
    train(model, [chain], batches(0, 1))
    saved = chain.state_dict()
    assert saved["mark"] is True
    chain.load_state_dict(saved)
    steps = [
        "chain before step",
        "muon before step",
        "muon after step",
        "chain after step",
    ]
    loads = [
        "chain before load",
        "muon before load",
        "muon after load",
        "chain after load",
    ]
    assert calls == [*steps, "before state", *loads]

    def halved(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return {
            **state,
            "param_groups": [{**g, "lr": g["lr"] / 2} for g in state["param_groups"]],
        }

    chain.register_load_state_dict_pre_hook(halved)
    chain.load_state_dict(saved)
    assert [g["lr"] for g in chain.param_groups] == [0.01, 0.005, 0.015]


@pytest.mark.parametrize(
    "wrap", [lambda chain: chain, lambda chain: AdaScale(chain, scale=1.0)]
)
def test_what_a_hook_on_one_optimizer_adds_to_a_state_comes_back_to_it(
    wrap: Callable[[OptimizerChain], Any],
) -> None:
    model = make_model()
    muon, adamw = members(model)
    chain = OptimizerChain([muon, adamw])
    optimizer = wrap(chain)
    # groups in another order
    new = nn.Parameter(torch.ones(2, 2))
    optimizer.add_param_group({"params": [new], "optimizer": 0})
    train(model, [optimizer], batches(0, 2))
    alone, torchs = adamw.state_dict(), Optimizer.state_dict(chain)
    calls: list[Any] = []

    def add(one: Optimizer, state: dict[str, Any]) -> None:
        assert one is adamw
        assert state == alone
        state["mark"] = "of adamw"

    adamw.register_state_dict_pre_hook(lambda one: calls.append(one))
    adamw.register_state_dict_post_hook(add)
    adamw.register_load_state_dict_pre_hook(
        lambda one, state: calls.append(state["mark"])
    )
    saved = chain.state_dict()
    assert {key: saved[key] for key in torchs} == torchs
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert calls == [adamw, adamw, "of adamw"]


# ---- groups --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap", [lambda chain: chain, lambda chain: AdaScale(chain, scale=1.0)]
)
def test_a_new_group_goes_to_the_optimizer_that_it_names(
    wrap: Callable[[OptimizerChain], Any],
) -> None:
    ours, theirs = make_model(), make_model()
    models = [
        nn.ModuleList([ours, nn.Linear(6, 2, bias=False)]),
        nn.ModuleList([theirs, nn.Linear(6, 2, bias=False)]),
    ]
    models[1].load_state_dict(models[0].state_dict())
    muon, adamw = members(ours)
    chain = OptimizerChain([muon, adamw])
    optimizer, plain = wrap(chain), list(members(theirs))
    given = {"params": models[0][1].parameters(), "lr": 0.05, "optimizer": 0}
    optimizer.add_param_group(given)
    assert given["optimizer"] == 0
    plain[0].add_param_group({"params": models[1][1].parameters(), "lr": 0.05})
    assert [g["lr"] for g in optimizer.param_groups] == [
        0.02,
        0.01,
        0.03,
        0.05,
    ]  # the last one, so that others keep their number
    assert chain.parts() == [(muon, [0, 3]), (adamw, [1, 2])]
    assert muon.param_groups[1]["momentum"] == 0.95
    for model, optimizers in zip(models, ([optimizer], plain), strict=True):
        for x in batches(0, 5):
            (loss_of(model[0], x) + (model[1](x) - 1).square().mean()).backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
    assert torch.equal(weights(models[0]), weights(models[1]))
    saved = chain.state_dict()
    assert [g["params"] for g in saved["param_groups"]] == [[0, 1], [2, 3], [4, 5], [6]]
    assert set(saved["state"][6]) == {"momentum_buffer"}
    before = copy.deepcopy(muon.state_dict())
    chain.load_state_dict(saved)
    assert_same(muon.state_dict(), before)


def test_a_group_that_an_optimizer_gets_by_itself_comes_last() -> None:
    model = make_model()
    muon, adamw = members(model)
    chain = OptimizerChain([muon, adamw])
    muon.add_param_group(
        {"params": nn.Linear(2, 2, bias=False).parameters(), "lr": 0.5}
    )
    assert [g["lr"] for g in chain.param_groups] == [0.02, 0.01, 0.03, 0.5]


@pytest.mark.parametrize(
    "named",
    [
        {},
        {"optimizer": 2},
        {"optimizer": -1},
        {"optimizer": True},
        {"optimizer": "muon"},
    ],
)
def test_a_new_group_must_name_an_optimizer(named: dict[str, Any]) -> None:
    chain = make(make_model())
    with pytest.raises(
        ValueError, match=r"Must be the number of .*: 0 \(Muon\), 1 \(AdamW\)"
    ):
        chain.add_param_group({"params": nn.Linear(2, 2).parameters(), **named})
    model = make_model()
    OptimizerChain([SGD(model[0].parameters(), lr=0.1)]).add_param_group(
        {"params": model[2].parameters()}
    )


def test_defaults_are_those_that_all_have_so_one_cycle_moves_a_common_momentum_only() -> (
    None
):
    model = make_model()
    chain = make(model)
    assert "lr" in chain.defaults
    assert "momentum" not in chain.defaults
    assert "betas" not in chain.defaults
    with pytest.raises(ValueError, match="momentum"):
        OneCycleLR(chain, 0.1, total_steps=5)
    sgds = OptimizerChain(
        [SGD(model[i].parameters(), lr=0.1, momentum=0.9) for i in (0, 2)]
    )
    OneCycleLR(sgds, 0.1, total_steps=5)
    assert [g["momentum"] for g in sgds.param_groups] == [0.95, 0.95]


# ---- what is refused -----------------------------------------------------------------


class Needy(SGD):
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        return super().step(closure)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda m: [], "the list is empty"),
        (lambda m: SGD(m.parameters(), lr=0.1), r"one optimizer\. Must be a list"),
        (lambda m: [m], "one is of type Sequential"),
        (lambda m: [Muon([m[0].weight]), AdamW(m.parameters())], r"shape \(8, 6\) is in optimizer 0 \(Muon\) .* 1 \(AdamW\)"),
        (lambda m: [*members(m), SGD(m[4].parameters(), lr=0.1)], r"optimizer 1 \(AdamW\) and in optimizer 2 \(SGD\)"),
        (lambda m: [LBFGS(m.parameters())], "LBFGS can't be part of a chain"),
        (lambda m: [Needy(m.parameters(), lr=0.1)], "Needy can't be part of a chain"),
        (lambda m: [AdaScale(SGD(m.parameters(), lr=0.1))], r"AdaScale\(OptimizerChain"),
        (lambda m: [OSS(m.parameters(), SGD, lr=0.1)], r"OSS\.wrap\(OptimizerChain"),
        (lambda m: [make(m)], "List its optimizers"),
        (lambda m: [OSS.wrap(SGD(m.parameters(), lr=0.1))._full], r"The SGD is sharded by OSS already"),
    ],
)  # fmt: skip
def test_optimizers_that_cannot_be_chained_are_refused(
    wrong: Callable[[Any], Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        OptimizerChain(wrong(make_model()))


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_of_optimizers_is_refused_and_the_chain_is_named(
    kind: Callable[[Any], Any],
) -> None:
    with pytest.raises(
        ValueError, match=r"of 2\. Must be one\. .*ray_adascale\.OptimizerChain\(\["
    ):
        AdaScale(kind(members(make_model())))


def test_a_parameter_twice_by_a_new_group_is_refused_and_not_added() -> None:
    model = make_model()
    chain = make(model)
    with pytest.raises(
        ValueError, match=r"in optimizer 0 \(Muon\) and in optimizer 1 \(AdamW\)"
    ):
        chain.add_param_group({"params": [model[0].weight], "optimizer": 1})
    assert len(chain.param_groups) == 3
    train(model, [chain], batches(0, 1))


@pytest.mark.parametrize("part", [0, 1])
def test_a_member_of_a_sharded_chain_is_not_sharded_or_chained_again(part: int) -> None:
    chain = make(make_model())
    OSS.wrap(chain)
    with pytest.raises(ValueError, match="sharded already"):
        OSS.wrap(chain.optimizers[part])
    with pytest.raises(ValueError, match="sharded by OSS already"):
        OptimizerChain([chain.optimizers[part]])


# ---- a worker's share ----------------------------------------------------------------


def wide_head() -> nn.Sequential:
    model = make_model()
    model[4] = nn.Linear(8, 20)
    return model


def two_outputs(model: nn.Module) -> Any:
    return lambda x: model(x)[:, :2]


def _share() -> tuple[list[tuple[str, int]], Tensor, float]:
    """Each fragment's parameter and elements, the weights after some steps, and a
    matrix's LR as its scheduler leaves it.
    """
    model = wide_head()
    chain = make(model)
    # it patches the step of the chain, which is not the one of a share
    scheduler = CosineAnnealingLR(chain, 12)
    optimizer = OSS.wrap(chain)
    names = {p: name for name, p in model.named_parameters()}
    owned = [(names[f.param], f.numel) for f in optimizer.fragments]
    assert all(
        f.tensor.shape == f.param.shape for f in optimizer.fragments if f.group == 0
    )
    train(two_outputs(model), [optimizer], batches(0, 5), (scheduler,))
    return owned, weights(model), chain.param_groups[0]["lr"]


def test_muons_matrices_are_whole_and_adamws_parameters_in_equal_parts(
    pool: Any,
) -> None:
    (one, ends, lr), (other, same, _) = pool(2).run(_share)
    # Parameters begin at multiples of 16 elements, the last of a group first: 2.bias at
    # 0, 0.bias at 16, 4.bias at 32, 4.weight at 64, the end is 224. So the border at
    # 112 divides 4.weight. The larger matrix is dealt out first.
    assert one == [
        ("2.weight", 64),
        ("0.bias", 8),
        ("2.bias", 8),
        ("4.weight", 112 - 64),
        ("4.bias", 20),
    ]
    assert other == [("0.weight", 48), ("4.weight", 224 - 112)]
    twin = wide_head()
    plain = members(twin)
    schedulers = tuple(CosineAnnealingLR(optimizer, 12) for optimizer in plain)
    train(two_outputs(twin), list(plain), batches(0, 5), schedulers)
    assert torch.equal(ends, weights(twin))
    assert torch.equal(ends, same)
    assert lr == plain[0].param_groups[0]["lr"]


# ---- what else reads an optimizer ----------------------------------------------------


def test_the_forecasts_momentum_is_that_of_the_optimizer_with_the_most_elements() -> (
    None
):
    model = make_model()
    assert momentum_of(make(model)) == Momentum(
        0.95, is_beta=False, optimizer_class="Muon", auto_rule="adascale_memory"
    )  # 64 + 48 elements against 34
    most_to_adamw = [
        Muon([model[4].weight], momentum=0.8),
        AdamW([model[0].weight, model[2].weight], betas=(0.7, 0.9)),
    ]
    assert momentum_of(OptimizerChain(most_to_adamw)) == Momentum(
        0.7, is_beta=True, optimizer_class="AdamW", auto_rule="adascale_memory"
    )
    # the rule is that of the whole chain
    smaller = SGD([model[4].weight], lr=0.1, momentum=0.9)
    for momentum, rule in ((0.9, "adascale_memory"), (0.4, "adascale")):
        smaller.param_groups[0]["momentum"] = momentum
        chain = OptimizerChain([Muon([model[0].weight]), smaller])
        assert momentum_of(chain).optimizer_class == "Muon"
        assert momentum_of(chain).auto_rule == rule


def test_a_chain_has_state_if_one_of_its_optimizers_has() -> None:
    model = make_model()
    plain = [SGD(model[i].parameters(), lr=0.1) for i in (0, 2)]
    assert not has_state(OptimizerChain(plain))
    assert has_state(
        OptimizerChain([*plain, SGD(model[4].parameters(), lr=0.1, momentum=0.5)])
    )


# ---- betas on the effective clock ----------------------------------------------------


def scaled(model: nn.Module, optimizer: Optimizer, rule: Any) -> AdaScale:
    return AdaScale(
        optimizer, scale=4.0, num_gradients_to_accumulate=2, rule=rule, single_gain=True
    )


@pytest.mark.parametrize("momentum", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_betas_change_in_groups_that_have_them(momentum: bool, sharded: bool) -> None:
    model = make_model()
    muon, adamw = members(model)
    chain = OptimizerChain([muon, adamw])
    adascale = scaled(
        model,
        OSS.wrap(chain) if sharded else chain,
        AdaScaleMemoryRule(BetaRule(muon=float(momentum))),
    )
    used: list[Any] = []
    rates: list[float] = []
    adamw.register_step_pre_hook(
        lambda o, a, k: rates.extend(g["lr"] for g in chain.param_groups)
    )
    own = [group["lr"] for group in chain.param_groups]
    muon.register_step_pre_hook(
        lambda o, a, k: used.append(chain.param_groups[0]["momentum"])
    )
    adamw.register_step_pre_hook(
        lambda o, a, k: used.append(chain.param_groups[2]["betas"])
    )
    buffer = torch.zeros(8, 8)
    effective = 0.0
    for i in range(4):
        for x in batches(2 * i, 2 * i + 2, 4):
            (loss_of(model, x) / 2).backward()
        grad = model[2].weight.grad.clone()
        adascale.step()
        adascale.zero_grad()
        r = adascale.last_step.gain
        effective += r
        m = 0.95**r if momentum else 0.95
        buffer = m * buffer + (1 - m) * grad
        assert used == [pytest.approx(m), pytest.approx((0.9**r, 0.999**r))]
        used.clear()
        # Adam's step is divided by the size of the gradients, Muon's by that of an
        # average.
        factors = [r, r**0.5, r**0.5]
        assert rates == pytest.approx(
            [factor * lr for factor, lr in zip(factors, own, strict=True)]
        )
        rates.clear()
        state = adascale.state_dict()["state"]
        torch.testing.assert_close(state[0]["momentum_buffer"], buffer)
        assert [float(state[i]["step"]) for i in range(2, 6)] == pytest.approx(
            [effective] * 4
        )
    assert effective > 4.4
    assert (chain.param_groups[0]["momentum"], chain.param_groups[1]["betas"]) == (
        0.95,
        (0.9, 0.999),
    )


def test_a_chain_without_betas_and_a_part_that_cannot_be_corrected_are_refused() -> (
    None
):
    model = make_model()
    without = OptimizerChain([Muon([model[0].weight]), SGD([model[2].weight], lr=0.1)])
    with pytest.raises(
        ValueError, match=r"groups of Muon and SGD have none\. Use Adam"
    ):
        scaled(model, without, AdaScaleMemoryRule(BetaRule()))
    scaled(model, without, AdaScaleMemoryRule(BetaRule(muon=1)))
    scaled(model, without, AdaScaleMemoryRule(BetaRule(momentum=1)))
    nadam = OptimizerChain(
        [AdamW([model[0].weight]), torch.optim.NAdam([model[2].weight])]
    )
    with pytest.raises(ValueError, match="not known to be exact with NAdam"):
        scaled(model, nadam, AdaScaleMemoryRule())
