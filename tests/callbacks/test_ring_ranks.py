"""RingMonitor on two real gloo ranks: changes no bit, records what all ranks found, names planted faults."""

import json
import os
import platform
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

import ring_module
import stabilitykit
import tiny
from ring_cases import BACKWARD, BUGS
from stabilitykit import RingMonitor
from stabilitykit.catalog import CATALOG
from stabilitykit.parallel import ring
from stabilitykit.parallel.balance import balance
from stabilitykit.parallel.layout import LAYOUTS
from stabilitykit.parallel.transport import Ring
from stabilitykit.runlog import read_records
from torchrun import on_two_ranks

pytestmark = pytest.mark.slow
LAYERS = ["model.blocks.0", "model.blocks.1"]
# A number that each planted fault moves over its limit at every look.
MOVED = {
    "stale keys": "key_sum",
    "dk and dv mixed": "key_sum",
    "dk one block off": "query_key",
    "dropped dv hop": "value_sum",
    "stale lse": "row_mass",
    "skipped hop": "key_sum",
    "diagonal in the forward": "key_sum",
    "diagonal in both": "roundoff_ratio",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder in which two ranks have trained once per case: one start-up serves all tests."""
    folder = tmp_path_factory.mktemp("ring")
    on_two_ranks(__file__, folder)
    return folder


def records(folder):
    return read_records(folder / "stability")


def test_watching_changes_nothing_with_all_monitors_on(runs):
    told = [json.loads(path.read_text()) for path in sorted(runs.glob("told-*.json"))]
    assert told == 2 * [{"1": True, "4": True, "resumed": True, "memory": True}]


def test_a_resumed_run_records_the_same(runs):
    # Read here, not by a rank: the other may still be writing.
    whole, parts = (
        [row.detail["layers"] for row in records(runs / n).of("ring")] for n in ("whole", "parts")
    )
    assert len(whole) == 6 and whole == parts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_record_is_of_all_ranks_with_the_worst_rank_named(runs, layout):
    found = records(runs / layout).of("ring")
    assert [record.step for record in found] == [1, 3]
    for record in found:
        assert record.values.keys() == {key for key in CATALOG if key.startswith("ring/")}
        assert record.values["ring/rel_l2"] < 2e-6
        assert record.values["ring/transport"] == 0
        assert list(record.detail["layers"]) == LAYERS
        for row in record.detail["layers"].values():
            assert row["rank"] in (0, 1) and row["host"] == platform.node()
            assert [head["head"] for head in row["heads"]] == [0, 1]
            assert {head["rank"] for head in row["heads"]} <= {0, 1}
        (balanced,) = record.detail["balance"]
        expected = balance(layout, 2, 16, tile=(4, 4), unit="tiles")
        assert balanced["ranks"] == [0, 1]
        assert balanced["tiles"] == [4 * tiles for tiles in expected.per_rank]  # two layers, two passes
        assert balanced["imbalance"] == balanced["predicted_imbalance"] == expected.imbalance
        assert record.values["ring/imbalance"] == expected.imbalance
        assert 0 < record.values["ring/wait_percent"] <= 100
        assert all(seconds > 0 for seconds in balanced["work_s"])
    assert records(runs / layout).of("event") == []


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_fault_is_named_within_three_due_steps(runs, bug):
    found = records(runs / "bugs" / bug.replace(" ", "_"))
    opened = found.of("event")[0]
    assert (opened.step, opened.detail["kind"], opened.detail["monitor"]) == (2, "deviation", "ring")
    assert {place["layer"] for place in opened.detail["places"]} == set(LAYERS)
    key = f"ring/{MOVED[bug]}"
    limit = CATALOG[key].limit("float32")
    assert all(record.values[key] >= limit for record in found.of("ring"))


def test_a_block_damaged_on_its_way_is_named_at_once_with_ranks_and_hop_and_closed(runs):
    opened, closed = records(runs / "flipped").of("event")
    assert (opened.step, opened.detail["kind"], opened.detail["monitor"]) == (1, "ring", "ring transport")
    (place,) = opened.detail["places"]
    ranks = {"sender": 1, "receiver": 0, "owner": 1}
    assert place == {"layer": "model.blocks.0", "pass": "forward", "hop": 1, **ranks}
    host = platform.node()
    assert (
        f"model.blocks.0, forward, hop 1, from rank 1 on {host} to rank 0 on {host}"
        in opened.detail["message"]
    )
    assert (closed.detail["id"], closed.detail["end"]) == (opened.detail["id"], 2)


def two_ranks(folder):
    """Run on each of two gloo ranks by `runs`."""
    rank, told = int(os.environ["RANK"]), {}
    torch.set_num_threads(1)

    def train(name, callbacks, steps, accumulate=1, fit=None, **options):
        torch.manual_seed(11)
        module = ring_module.module(**options)
        run = tiny.trainer(
            folder / name, callbacks, max_steps=steps, devices=2, strategy="ddp",
            accumulate_grad_batches=accumulate,
        )  # fmt: skip
        run.fit(
            module,
            ring_module.batches(12 * accumulate, rank, 2, options.get("layout", "striped")),
            **fit or {},
        )
        state = module.losses, [p.detach().clone() for p in module.parameters()], torch.get_rng_state()
        return run, state

    for accumulate in (1, 4):
        chosen = [
            *stabilitykit.monitors(),
            RingMonitor(),
            stabilitykit.WeightMonitor(floor_seeds=1, window=1),
        ]
        for monitor in chosen:
            monitor.every_n_steps = 1
        plain, watched = (train(f"law{accumulate}", c, 4, accumulate)[1] for c in ([], chosen))
        told[str(accumulate)] = (
            plain[0] == watched[0]
            and all(torch.equal(a, b) for a, b in zip(plain[1], watched[1], strict=True))
            and torch.equal(plain[2], watched[2])
        )
    for layout in LAYOUTS:
        train(layout, [RingMonitor(2)], 4, layout=layout)
    told |= resumed(folder, train)
    for bug in BUGS:
        with planted(bug):
            train(f"bugs/{bug.replace(' ', '_')}", [RingMonitor(1)], 3)
    with flipped(rank):
        train("flipped", [RingMonitor(1)], 4)
    (folder / f"told-{rank}.json").write_text(json.dumps(told))


def resumed(folder, train):
    """Whether six steps, a checkpoint and six more are the same as twelve."""
    whole, parts = RingMonitor(2), RingMonitor(2)
    _, plain = train("whole", [whole], 12, dropout=0.0)
    run, _ = train("parts", [RingMonitor(2)], 6, dropout=0.0)
    run.save_checkpoint(folder / "6.ckpt")
    _, again = train("parts", [parts], 12, fit={"ckpt_path": folder / "6.ckpt"}, dropout=0.0)
    return {"resumed": again[0] == plain[0][6:], "memory": whole.memory() == parts.memory()}


@contextmanager
def planted(bug):
    """Every call of the training has the bug of tests/ring_cases.py."""
    forward = ring._forward

    def wrong(plan, *args):
        with BUGS[bug](2, "forward"):
            return forward(plan, *args)

    def wrong_back(plan, *args):
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(ring, "_backward", BACKWARD))
            stack.enter_context(BUGS[bug](2, "forward"))
            stack.enter_context(BUGS[bug](2, "backward"))
            return ring._backward(plan, *args)

    with mock.patch.object(ring, "_forward", wrong), mock.patch.object(ring, "_backward", wrong_back):
        yield


@contextmanager
def flipped(rank):
    """The second step's first block that rank 1 sends has a flipped bit."""
    sent, pass_on = [], Ring.pass_on

    def wrong(self, leaving, arriving):
        # A step has 8: in two layers one forward, three back; its measuring has 8 more.
        sent.append([x.clone() for x in leaving])
        if rank == 1 and len(sent) == 16 + 1:
            sent[-1][0].view(torch.int32).flatten()[3] ^= 1
        return pass_on(self, sent[-1], arriving)

    with mock.patch.object(Ring, "pass_on", wrong):
        yield


if __name__ == "__main__":
    two_ranks(Path(sys.argv[1]))
