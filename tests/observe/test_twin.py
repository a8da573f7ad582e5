import copy
import random
from collections import deque

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import tiny
from stabilitykit.observe.arm import Arm
from stabilitykit.observe.tap import Tap
from stabilitykit.observe.twin import Twin


def start(seed=0, **options):
    torch.manual_seed(seed)
    module = tiny.Model(layers=1, **options)
    return module, torch.optim.AdamW(module.parameters(), lr=1e-2)


def loss_of(module, index):
    tokens, targets = tiny.batch(index, size=2)
    return F.cross_entropy(module(tokens).flatten(0, 1), targets.flatten())


def run(module, optimizer, twins, steps, first=0):
    """The main run with its twins before it, as a trainer would interleave them."""
    losses = []
    for index in range(first, first + steps):
        for twin in twins:
            twin.forward_backward(lambda index=index: loss_of(module, index))
        loss = loss_of(module, index)
        loss.backward()
        for twin in twins:
            twin.step()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def apart(twin):
    main, own = twin.pairs()
    return max(float((own[name].double() - main[name].double()).abs().max()) for name in main)


@pytest.mark.parametrize(
    "text",
    [
        "same",
        "float32",
        "float64",
        "bfloat16",
        "jitter",
        "jitter=1e-3",
        "seed=4",
        "float16",
        "lr*0.5+clip=0.1",
        "exact_attention+skip=2",
        "update_rms_clip+beta2=0.5+lr_hold",
        "float16=unscaled",
        "attention=math",
    ],
)
def test_every_arm_leaves_the_run_unchanged_and_differs_but_for_same(text):
    plain, optimizer = start()
    expected = run(plain, optimizer, [], 4)
    stream = torch.get_rng_state()
    module, optimizer = start()
    state = module.state_dict()
    twin = Twin(module, [optimizer], text)
    assert run(module, optimizer, [twin], 4) == expected
    assert torch.equal(stream, torch.get_rng_state())
    assert all(
        a.data_ptr() == b.data_ptr()
        for a, b in zip(state.values(), module.state_dict().values(), strict=True)
    )
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), module.parameters(), strict=True))
    assert (apart(twin) == 0) == (text in ("same", "float32"))  # a float32 run without autocast


def test_a_twin_forked_in_mid_run_has_the_optimizers_state():
    module, optimizer = start()
    run(module, optimizer, [], 3)
    twin, fresh = (
        Twin(module, [optimizer], "same"),
        Twin(module, [torch.optim.AdamW(module.parameters(), 1e-2)], "same"),
    )
    run(module, optimizer, [twin, fresh], 3, first=3)
    assert apart(twin) == 0
    assert apart(fresh) > 0


def test_a_float64_twin_is_a_float64_run():
    module, optimizer = start(dropout=0.0)
    twin = Twin(module, [optimizer], "float64")
    reference = copy.deepcopy(module).double()
    run(module, optimizer, [twin], 5)
    run(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2), [], 5)
    own = twin.pairs()[1]
    for name, p in reference.named_parameters():
        assert own[name].dtype == torch.float64
        assert torch.equal(own[name], p), name


def test_optimizer_state_is_cast_too_and_what_a_forward_makes():
    module, optimizer = start(dropout=0.0)
    run(module, optimizer, [], 2)
    twin = Twin(module, [optimizer], "float64")

    def loss():
        eye = torch.eye(tiny.VOCAB)  # no dtype named: a matmul of float32 with float64 would fail
        return (module(tiny.batch(0)[0]) @ eye).sum()

    twin.forward_backward(loss)
    twin.step()
    for state in twin.optimizers[0].state.values():
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float64
        assert state["step"].dtype == torch.float32


def test_what_the_run_freezes_later_is_frozen_in_the_twin():
    module, optimizer = start()
    twin = Twin(module, [optimizer], "same")
    module.embed.requires_grad_(False)
    run(module, optimizer, [twin], 2)
    assert apart(twin) == 0
    assert twin._params[id(module.embed.weight)].grad is None


def test_float32_switches_autocast_off_and_bfloat16_on():
    module, optimizer = start(dropout=0.0)
    seen = []

    def forward():
        loss = loss_of(module, 0)
        seen.append(torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"))
        return loss

    def backward(loss):
        seen.append(torch.is_autocast_enabled("cpu"))
        loss.backward()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        same = Twin(module, [optimizer], "same").forward_backward(forward, backward)
        full = Twin(module, [optimizer], "float32").forward_backward(forward, backward)
    low = Twin(module, [optimizer], "bfloat16").forward_backward(forward, backward)
    assert seen == [torch.bfloat16, False, False, False, torch.bfloat16, False]
    assert same == low
    assert full == loss_of(module, 0).detach()
    assert full != low


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_jitter_is_one_ulp_of_the_stored_format_either_way(dtype):
    module = nn.Linear(64, 64).to(dtype)
    module.bias.requires_grad_(False)
    twin, other = (Twin(module, [], "jitter", seed=seed) for seed in (0, 1))
    main, own = module.weight.detach(), twin.pairs()[1]["weight"]
    up = torch.nextafter(main, torch.full_like(main, torch.inf))
    down = torch.nextafter(main, torch.full_like(main, -torch.inf))
    assert ((own == up) | (own == down)).all()
    assert 0.4 < (own == up).double().mean() < 0.6
    assert not torch.equal(own, other.pairs()[1]["weight"])
    assert torch.equal(own, Twin(module, [], "jitter", seed=0).pairs()[1]["weight"])
    assert torch.equal(twin._params[id(module.bias)], module.bias)
    assert list(twin.pairs()[0]) == ["weight"]  # what is frozen is neither moved nor compared


def test_jitter_by_a_factor():
    module = nn.Linear(64, 64).double()
    own = Twin(module, [], "jitter=1e-6").pairs()[1]["weight"]
    torch.testing.assert_close(
        (own / module.weight.detach() - 1).abs(), torch.full_like(own, 1e-6), rtol=1e-6, atol=0
    )


def test_seed_gives_the_twin_a_stream_of_its_own_that_repeats():
    module, optimizer = start(dropout=0.5)
    losses = []
    for _ in range(2):
        torch.rand(3)  # wherever the run's stream is
        twin = Twin(module, [optimizer], "seed=7")
        losses.append([twin.forward_backward(lambda: loss_of(module, 0)).item() for _ in range(2)])
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][1]  # not one mask for ever


def test_ties_hold():
    module, _ = start()
    module.head.weight = module.embed.weight
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    twin = Twin(module, [optimizer], "jitter")
    with twin.swapped():
        assert module.head.weight is module.embed.weight
        assert module.head.weight is not twin._mains["embed.weight"]
    assert "head.weight" not in twin.pairs()[1]
    same = Twin(module, [optimizer], "same")
    run(module, optimizer, [same], 3)
    assert apart(same) == 0


def test_learning_rates_follow_the_run_at_its_step():
    module, optimizer = start(dropout=0.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    twin = Twin(module, [optimizer], "same")
    for index in range(4):
        run(module, optimizer, [twin], 1, first=index)
        schedule.step()
    assert apart(twin) == 0
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ValueError, match="the run has other parameter groups since the fork"):
        twin.step()


class Holds(nn.Module):
    """Plain attributes of every sort, changed by each pass."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.register_buffer("mean", torch.zeros(1))
        self.calls, self.cache, self.log_of = 0, torch.zeros(1), {"losses": [], "sum": torch.zeros(1)}
        self.recent, self.names, self.shared = deque(maxlen=2), {"a"}, object()
        self.raw = [self.linear.weight]

    def forward(self, x):
        out = x @ self.raw[0].T + self.linear.bias + self.mean
        self.mean = 0.5 * self.mean + 0.5 * out.mean().detach()  # replaces the buffer
        self.calls += 1
        self.cache += 1
        self.log_of["losses"].append(out.sum().item())
        self.log_of["sum"] += 1
        self.recent.append(self.calls)
        self.names.add(str(self.calls))
        self.fresh = out.detach()
        random.random(), numpy.random.rand()
        return out.square().mean()


def test_buffers_and_plain_attributes_are_put_back():
    module = Holds()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    twin = Twin(module, [optimizer], "float64")
    streams = random.getstate(), numpy.random.get_state()[1].tolist()
    held, mean = dict(vars(module)), module.mean
    twin.forward_backward(lambda: module(torch.ones(3, 2, dtype=torch.float64)))
    twin.step()
    assert vars(module) == held
    assert module.mean is mean
    assert (module.calls, module.cache.item(), module.log_of["losses"], module.log_of["sum"].item()) == (
        0,
        0,
        [],
        0,
    )
    assert (len(module.recent), module.names, module.raw[0] is module.linear.weight) == (0, {"a"}, True)
    assert twin._buffers[""]["mean"].dtype == torch.float64
    assert twin._buffers[""]["mean"] != 0
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == streams


def test_log_is_muted():
    class Logs(nn.Linear):
        lines = ()

        def log(self, *args):
            self.lines = (*self.lines, args)

        log_dict = log

    module = Logs(1, 1)
    twin = Twin(module, [], "same")
    with twin.swapped():
        module.log("loss", 1)
        module.log_dict({"loss": 1})
    module.log("loss", 2)
    assert module.lines == (("loss", 2),)


def test_a_raw_reference_is_caught_and_named():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    hidden = module[1].weight
    twin = Twin(module, [torch.optim.SGD(module.parameters(), 0.1)], "same")
    with pytest.raises(ValueError, match=r"changed parameter '1.weight' of the run .* raw reference"):
        twin.forward_backward(lambda: (module[0](torch.ones(1, 2)) @ hidden).sum())


def test_a_write_to_a_raw_reference_is_caught():
    module = nn.Linear(2, 2)
    hidden = module.bias
    twin = Twin(module, [torch.optim.SGD(module.parameters(), 0.1)], "same")

    def loss():
        with torch.no_grad():
            hidden.mul_(2)
        return module(torch.ones(1, 2)).sum()

    with pytest.raises(ValueError, match="changed parameter 'bias' of the run"):
        twin.forward_backward(loss)


def test_a_parameter_made_later_is_named():
    module = nn.Sequential(nn.Linear(2, 2))
    twin = Twin(module, [], "same")
    module[0].bias = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=r"parameter '0.bias' was made after the twin was forked"):
        twin.forward_backward(lambda: module(torch.ones(1, 2)).sum())
    assert module[0].weight is twin._mains["0.weight"]


def test_the_module_is_whole_after_an_error():
    module, optimizer = start()
    before = [dict(vars(m)) for m in module.modules()]

    def fails():
        loss_of(module, 0)
        raise RuntimeError("mine")

    twin = Twin(module, [optimizer], "float64")
    with pytest.raises(RuntimeError, match="mine"):
        twin.forward_backward(fails)
    assert before == [vars(m) for m in module.modules()]
    assert torch.get_default_dtype() == torch.float32


def test_a_tap_that_is_open_does_not_see_the_twin():
    module, optimizer = start()
    twin, seen = Twin(module, [optimizer], "float64"), []
    with Tap(module, seen.append):
        twin.forward_backward(lambda: loss_of(module, 0))
        loss_of(module, 0).backward()
    assert [(call.name, call.q.dtype) for call in seen] == [("blocks.0", torch.float32)]


def test_gradient_hooks_of_parameters_are_the_twins_too():
    module, optimizer = start()
    module.head.weight.register_hook(lambda grad: grad * 0.5)
    twin = Twin(module, [optimizer], "same")
    run(module, optimizer, [twin], 3)
    assert apart(twin) == 0


def test_attributes_that_optimizers_add_stay():
    class Mine(torch.optim.SGD):
        def __init__(self, params):
            super().__init__(params, lr=0.1)
            self.factor = 2.0

        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad.mul_(self.factor)
            return super().step(closure)

    module, _ = start()
    optimizer = Mine(module.parameters())
    twin = Twin(module, [optimizer], "same")
    run(module, optimizer, [twin], 2)
    assert apart(twin) == 0


def test_a_scaler_of_its_own():
    module, optimizer = start()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    twin = Twin(module, [optimizer], "same", scaler=scaler)
    assert twin.scaler is not scaler
    assert Twin(module, [optimizer], "float32", scaler=scaler).scaler is None
    run(module, optimizer, [twin], 3)
    assert apart(twin) == 0  # a power of two scales exactly


def lowest(module, optimizer, steps, scaler):
    """A run in float16 autocast, as a user writes it."""
    for index in range(steps):
        with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
            loss = loss_of(module, index)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()


@pytest.mark.parametrize(("text", "scaled"), [("float16", True), ("float16=unscaled", False)])
def test_float16_equals_a_float16_run_with_and_without_loss_scaling(text, scaled):
    module, optimizer = start(dropout=0.0)
    twin = Twin(module, [optimizer], text)
    assert (twin.scaler is not None) == scaled
    run(module, optimizer, [twin], 4)
    reference, own = start(dropout=0.0)
    lowest(reference, own, 4, torch.amp.GradScaler("cpu") if scaled else None)
    for name, p in reference.named_parameters():
        assert torch.equal(twin.pairs()[1][name], p), name
    assert apart(twin) > 0


@pytest.mark.parametrize(("text", "scaled"), [("float16", True), ("float16=unscaled", False)])
def test_float16_of_a_float16_run_has_no_effect(text, scaled):
    module, optimizer = start(dropout=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if scaled else None
    twin = Twin(module, [optimizer], text, scaler=scaler)
    for index in range(3):
        with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
            twin.forward_backward(lambda index=index: loss_of(module, index))
        twin.step()
    lowest(module, optimizer, 3, scaler)
    assert apart(twin) == 0


@pytest.mark.parametrize("kind", ["float64", "bfloat16", "seed=3"])
def test_an_arm_that_a_run_is_already_has_no_effect(kind):
    module, optimizer = start(dropout=0.0)
    module.to(torch.float64 if kind == "float64" else torch.float32)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    twin = Twin(module, [optimizer], kind)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "bfloat16", cache_enabled=False):
        run(module, optimizer, [twin], 3)
    assert apart(twin) == 0


def test_a_skipped_step_runs_nothing_and_counts():
    module, optimizer = start()
    twin = Twin(module, [optimizer], "skip=11-12", at=10)
    ran = [twin.forward_backward(lambda: loss_of(module, 0)) is not None and not twin.step() for _ in "x"]
    before = [p.clone() for p in twin.pairs()[1].values()]
    for _ in range(2):
        assert twin.forward_backward(lambda: pytest.fail("ran")) is None
        twin.step()
    assert ran == [True]
    assert all(torch.equal(a, b) for a, b in zip(before, twin.pairs()[1].values(), strict=True))
    assert twin.at == 13
    assert twin.forward_backward(lambda: loss_of(module, 0)) is not None


def test_sharded_parameters_are_refused_with_what_to_do(tmp_path):
    torch.distributed.init_process_group("gloo", store=torch.distributed.FileStore(str(tmp_path / "s"), 1),
                                         rank=0, world_size=1)  # fmt: skip
    try:
        module = nn.Linear(4, 4)
        fully_shard(module, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match="got 'weight' sharded; .*`stabilitykit compare A B`"):
            Twin(module, [], "same")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "text", ["float64", "seed=3", "jitter", "lr_hold+skip=4", "float16", "exact_attention"]
)
def test_state_is_taken_up_bit_for_bit(text):
    def forked():
        module, optimizer = start()
        return module, optimizer, Twin(module, [optimizer], text)

    module, optimizer, twin = forked()
    optimizer.param_groups[0]["lr"] = 5e-3  # a schedule's, from here on
    run(module, optimizer, [twin], 3)
    saved = copy.deepcopy(
        (twin.state_dict(), module.state_dict(), optimizer.state_dict(), torch.get_rng_state())
    )
    run(module, optimizer, [twin], 3, first=3)
    again, optimizer, restored = forked()
    restored.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    optimizer.load_state_dict(saved[2])
    torch.set_rng_state(saved[3])
    run(again, optimizer, [restored], 3, first=3)
    for name, own in twin.pairs()[1].items():
        assert torch.equal(own, restored.pairs()[1][name])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("float8", r"expected an arm \(same, float32, float64, bfloat16, float16, .*got 'float8'"),
        ("", "expected an arm .*got ''"),
        ("same+jitter", "expected an arm .*got 'same\\+jitter'"),
        ("float32=2", "got 'float32=2'"),
        ("seed=x", "got 'seed=x'"),
        ("seed", "got 'seed'"),
        ("jitter=0", "expected a jitter factor between 0 and 1, got 'jitter=0'"),
        ("jitter=nan", "expected a jitter factor"),
        ("float32+float64", "expected each respect once"),
    ],
)
def test_what_is_no_arm_is_named(text, words):
    with pytest.raises(ValueError, match=words):
        Arm.parse(text)


def test_arms_combine_and_name_their_key():
    arm = Arm.parse("bfloat16+jitter=1e-6+seed=3")
    assert (arm.autocast, arm.jitter, arm.seed, arm.dtype) == (torch.bfloat16, 1e-6, 3, None)
    assert arm.key == "bfloat16_jitter_1e_6_seed_3"


def test_an_optimizer_that_needs_a_closure_is_refused():
    module, _ = start()
    with pytest.raises(ValueError, match="without a closure, got LBFGS"):
        Twin(module, [torch.optim.LBFGS(module.parameters())], "same")
