"""Per-parameter numbers of an optimizer step against a plain loop; in parts on ranks they are the whole's."""

import math

import pytest
import torch
import torch.nn.functional as F

from ranks import ranks
from stabilitykit.numerics.precursors import SAMPLE, sample
from stabilitykit.observe.updates import Updates

EPS = 1e-8


def stepped(optimizer_of, steps=3, width=12, clip=None):
    """A model, its last gradients (before clipping and as used), weights before, and the numbers."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, 8), torch.nn.Linear(8, 4))
    optimizer = optimizer_of(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        F.mse_loss(model(torch.randn(5, width)), torch.randn(5, 4)).backward()
        updates = Updates(dict(model.named_parameters()), world=1)
        if step == steps - 1:
            raw = {name: p.grad.clone() for name, p in model.named_parameters()}
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            updates.watch(optimizer)
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    updates.close()
    cpu = torch.device("cpu")
    found = updates.read(updates.sums(cpu).tolist(), updates.peaks(cpu).tolist())
    return model, optimizer, raw, before, found


def test_adams_numbers_are_those_of_a_plain_loop():
    model, optimizer, raw, before, found = stepped(lambda p: torch.optim.AdamW(p, lr=1e-2), clip=0.1)
    for name, p in model.named_parameters():
        state = optimizer.state[p]
        v = state["exp_avg_sq"].double() / (1 - 0.999 ** state["step"].item())
        g = p.grad.double()
        wanted = {
            "grad": raw[name].norm().item(),  # before clipping; what follows is as Adam used it
            "update": (p.detach() - before[name]).norm().item(),
            "weight": p.detach().norm().item(),
            "rms": (g**2 / v.clamp_min(EPS**2)).mean().sqrt().item(),
            "small": (g.abs() < EPS).double().mean().item(),
            "peak": p.detach().abs().max().item(),
        }
        assert found[name] == pytest.approx(wanted, rel=1e-5)


def test_an_optimizer_without_moments_has_the_rest():
    model, _, _, before, found = stepped(lambda p: torch.optim.SGD(p, lr=0.5))
    assert set(found["0.weight"]) == {"grad", "update", "weight", "peak"}
    assert found["0.weight"]["update"] == pytest.approx((model[0].weight - before["0.weight"]).norm().item())


def test_a_step_that_does_not_happen_has_gradients_only():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    updates = Updates(dict(model.named_parameters()), world=1)
    updates.watch(optimizer, scale=torch.tensor(4.0))
    updates.close()
    optimizer.step()
    cpu = torch.device("cpu")
    found = updates.read(updates.sums(cpu).tolist(), updates.peaks(cpu).tolist())
    assert found == {
        "weight": {"grad": pytest.approx(math.sqrt(6) / 4)},
        "bias": {"grad": pytest.approx(math.sqrt(2) / 4)},
    }


def test_two_optimizers_and_a_second_step_of_one_are_not_mixed_up():
    one, two = torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(3, 2, bias=False)
    fast, slow = torch.optim.SGD(one.parameters(), lr=1.0), torch.optim.SGD(two.parameters(), lr=0.5)
    updates = Updates({"one": one.weight, "two": two.weight}, world=1)
    for layer, optimizer in ((one, fast), (two, slow)):
        layer(torch.ones(1, 3)).sum().backward()
        updates.watch(optimizer)
        optimizer.step()
    fast.step()
    cpu = torch.device("cpu")
    found = updates.read(updates.sums(cpu).tolist(), updates.peaks(cpu).tolist())
    assert found["one"]["update"] == pytest.approx(math.sqrt(6))
    assert found["two"]["update"] == pytest.approx(math.sqrt(6) / 2)


class OneMoment(torch.optim.SGD):
    """SGD that keeps what its name says of a second moment: of another shape, or none so far."""

    def __init__(self, params, moment):
        super().__init__([{"params": params, "eps": EPS, "betas": (0.9, 0.99)}], lr=0.1)
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"step": 1, "exp_avg_sq": moment}


@pytest.mark.parametrize(
    "optimizer_of",
    [
        lambda p: torch.optim.Adafactor(p, lr=0.1),
        lambda p: OneMoment(p, None),
        lambda p: OneMoment(p, torch.ones(())),
    ],
)
def test_what_is_no_second_moment_of_every_number_is_not_taken_for_one(optimizer_of):
    model, _, _, before, found = stepped(optimizer_of)
    assert "rms" not in found["0.weight"]
    assert found["0.weight"]["update"] == pytest.approx((model[0].weight - before["0.weight"]).norm().item())


def test_a_count_of_steps_may_be_the_groups():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([{"params": [weight], "eps": EPS, "betas": (0.9, 0.75), "step": 1}], lr=0.1)
    optimizer.state[weight] = {"exp_avg_sq": torch.ones(3)}
    weight.grad = torch.ones(3)
    assert measured({"w": weight}, optimizer)["w"]["rms"] == pytest.approx(0.5)  # v = 1 / (1 - 0.75)


def measured(parameters, optimizer):
    updates = Updates(parameters, world=1)
    updates.watch(optimizer)
    optimizer.step()
    updates.close()
    cpu = torch.device("cpu")
    return updates.read(updates.sums(cpu).tolist(), updates.peaks(cpu).tolist())


def test_formats_that_few_models_have_are_measured_together():
    dtypes = {"double": torch.float64, "half": torch.bfloat16, "complex": torch.complex64}
    parameters = {name: torch.nn.Parameter(torch.full((2,), 2.0, dtype=d)) for name, d in dtypes.items()}
    parameters["empty"] = torch.nn.Parameter(torch.zeros(0, 3))
    parameters["table"] = torch.nn.Parameter(torch.full((4, 1), 2.0))
    for p in parameters.values():
        p.grad = torch.ones_like(p.detach())
    parameters["complex"].grad = torch.tensor([3 + 4j, 0])
    parameters["table"].grad = torch.sparse_coo_tensor(
        [[1, 1]], [[2.0], [1.0]], (4, 1), check_invariants=True
    )
    found = measured(parameters, torch.optim.SGD([{"params": parameters.values(), "eps": 1.0}], lr=0.5))
    assert {name: row["grad"] for name, row in found.items()} == pytest.approx(
        {"double": 2**0.5, "half": 2**0.5, "complex": 5.0, "table": 3.0}
    )
    assert {name: row["update"] for name, row in found.items()} == pytest.approx(
        {"double": 0.5**0.5, "half": 0.5**0.5, "complex": 2.5, "table": 1.5}
    )
    assert found["table"]["small"] == 0.75  # rows that no token looked up
    assert found["complex"]["small"] == 0.5  # of real and imaginary parts


class Wrapping(torch.optim.Optimizer):
    """As schedule-free's wrapper: it has an optimizer, and never called its base class."""

    def __init__(self, inner):
        self.inner = inner

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)

    def step(self, closure=None):
        return self.inner.step(closure)


def test_an_optimizer_that_tells_nobody_when_it_stepped_has_gradients_only_and_is_named():
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    updates = Updates({"w": weight}, world=1)
    updates.watch(Wrapping(torch.optim.AdamW([weight])))
    updates.close()
    cpu = torch.device("cpu")
    assert updates.untold == {"Wrapping"}
    assert updates.read(updates.sums(cpu).tolist(), updates.peaks(cpu).tolist()).keys() == {"w"}


def test_of_a_large_tensor_means_are_of_a_sample_that_sees_every_column():
    wide = torch.arange(900 * 300.0).view(900, 300)
    numbers = sample([wide])
    assert SAMPLE / 2 < len(numbers) <= SAMPLE
    assert len((numbers % 300).unique()) == 300
    assert numbers.square().mean().item() == pytest.approx(wide.square().mean().item(), rel=1e-2)


def sharded(rank, world):
    """A case of tests/ranks.py: the same step with whole parameters and with FSDP2's, on every rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, told = init_device_mesh("cpu", (world,)), []
    for shard in (False, True):
        torch.manual_seed(0)
        # 5 and 3 rows over 2 ranks: parts of unlike sizes
        model = torch.nn.Sequential(torch.nn.Linear(12, 5), torch.nn.Linear(5, 3))
        if shard:
            fully_shard(model[0], mesh=mesh)
            fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        F.mse_loss(model(torch.ones(2, 12)), torch.zeros(2, 3)).backward()  # the same on every rank
        updates = Updates(dict(model.named_parameters()), world)
        updates.watch(optimizer)
        optimizer.step()
        updates.close()
        cpu = torch.device("cpu")
        sums, peaks = updates.sums(cpu), updates.peaks(cpu)
        torch.distributed.all_reduce(sums)
        torch.distributed.all_reduce(peaks, torch.distributed.ReduceOp.MAX)
        told.append(updates.read(sums.tolist(), peaks.tolist()))
    return told


def test_case_81_numbers_of_sharded_parameters_are_global_on_every_rank():
    for whole, parts in ranks(2).run(sharded):
        assert whole.keys() == parts.keys()
        for name in whole:
            assert parts[name] == pytest.approx(whole[name], rel=1e-5), name
