"""RingMonitor on one rank, without a process group; tests/callbacks/test_ring_ranks.py has two."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

import ring_module
import tiny
from stabilitykit import AttentionMonitor, PrecursorMonitor, RingMonitor
from stabilitykit.callbacks.loads import Load, Loads, balances
from stabilitykit.catalog import CATALOG
from stabilitykit.observe.apart import streams_kept, unseen
from stabilitykit.parallel import call as calls
from stabilitykit.parallel import ring
from stabilitykit.report.page import text_report, write_report
from stabilitykit.runlog import read_records

LAYERS = ["model.blocks.0", "model.blocks.1"]


def train(folder, callbacks, steps=4, accumulate=1, fit=None, **options):
    torch.manual_seed(5)
    run = tiny.trainer(folder, callbacks, max_steps=steps, accumulate_grad_batches=accumulate)
    module = ring_module.module(**options)
    run.fit(module, ring_module.batches(12 * accumulate), **(fit or {}))
    return run, module


def records(folder):
    return read_records(folder / "stability")


def test_due_steps_are_recorded_with_every_layer_head_and_rank(tmp_path):
    train(tmp_path, [RingMonitor(2, rows=5)])
    found = records(tmp_path).of("ring")
    assert [record.step for record in found] == [1, 3]
    for record in found:
        assert record.values.keys() == {key for key in CATALOG if key.startswith("ring/")}
        assert list(record.detail["layers"]) == LAYERS
        assert record.detail["rows"] == 5
        for row in record.detail["layers"].values():
            assert row["dtype"] == "float32"
            assert [head["head"] for head in row["heads"]] == [0, 1]
            assert row["rel_l2"] == max(head["rel_l2"] for head in row["heads"])
        assert record.values["ring/rel_l2"] < 2e-6 and record.values["ring/grad_rel_l2"] < 2e-5
        (balance,) = record.detail["balance"]
        # 32 rows in tiles of 4: 8 tiles on the diagonal, 28 below it; two layers, two passes.
        assert (balance["ranks"], balance["tiles"]) == ([0], [4 * 36])
        assert balance["imbalance"] == balance["predicted_imbalance"] == 1.0
        assert balance["work_s"][0] > 0
    assert records(tmp_path).of("event") == []


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_checkpointing_and_accumulation_record_each_call_once(tmp_path, reentrant, accumulate):
    seen = []
    measured = "stabilitykit.callbacks.ring.measured"
    with mock.patch(measured, side_effect=lambda call, **_: seen.append(call) or NUMBERS):
        train(tmp_path, [RingMonitor(2)], reentrant=reentrant, accumulate=accumulate)
    names = [call.name for call in seen]
    assert sorted(names) == sorted(2 * LAYERS)
    assert all(call.dq is not None for call in seen)


NUMBERS = {
    "dtype": "float32", "transport": 0.0,
    "heads": [{"head": 0, "roundoff_ratio": 1.0, "nonfinite": 0.0, "grad_roundoff_ratio": 1.0}],
}  # fmt: skip


def test_off_its_steps_it_costs_no_kernel_and_nobody_listens(tmp_path):
    from pytorch_lightning import Callback

    class Listens(Callback):
        def __init__(self):
            self.found = []

        def on_before_backward(self, trainer, pl_module, loss):
            self.found.append((len(calls.watchers), sum(len(m._forward_hooks) for m in pl_module.modules())))

    def operations(*callbacks):
        with tiny.Counted() as counted:
            train(tmp_path, callbacks, steps=3)
        return counted.count

    plain, listens = operations(), Listens()
    assert operations(RingMonitor(100)) == plain
    assert operations(RingMonitor(3), listens) > plain
    assert [watchers for watchers, _ in listens.found] == [0, 0, 1]
    assert [hooks > 0 for _, hooks in listens.found] == [False, False, True]
    assert calls.watchers == []


def test_a_model_without_ring_attention_is_told_once_and_trains_on(tmp_path):
    run = tiny.trainer(tmp_path, [RingMonitor(2)], max_steps=4)
    with pytest.warns(UserWarning, match="saw no ring_attention call in this step") as said:
        run.fit(tiny.module_class("pytorch_lightning")(), tiny.batches(4))
    assert len([w for w in said if "RingMonitor" in str(w.message)]) == 1
    found = records(tmp_path).of("ring")
    assert [(record.step, record.values, record.detail["layers"]) for record in found] == [
        (1, {}, {}),
        (3, {}, {}),
    ]


def test_beside_attention_monitor_each_sees_its_own_and_it_is_said_once(tmp_path):
    with pytest.warns(UserWarning) as said:
        train(tmp_path, [AttentionMonitor(1), RingMonitor(1), PrecursorMonitor(1)])
    ours = [str(w.message) for w in said if "AttentionMonitor" in str(w.message)]
    assert ours == [
        "stabilitykit: AttentionMonitor does not see the attention of model.blocks.0 and 1 more: attention "
        "across ranks, of which no rank has all; RingMonitor watches it. Training goes on"
    ]
    for record in records(tmp_path).of("attention"):
        assert record.values == {} and record.detail["layers"] == {}
        assert list(record.detail["skipped"]) == LAYERS
    assert all(list(r.detail["layers"]) == LAYERS for r in records(tmp_path).of("ring"))
    assert records(tmp_path).of("event") == []


def test_attention_monitor_alone_says_who_could_watch(tmp_path):
    with pytest.warns(
        UserWarning, match="across ranks, of which no rank has all; add stabilitykit.RingMonitor"
    ):
        train(tmp_path, [AttentionMonitor(1)], steps=1)


def test_a_kernel_that_is_a_little_off_is_a_deviation_after_three_looks_that_names_layer_and_head(tmp_path):
    plain = ring._forward

    def off(plan, *args):
        out, lse = plain(plan, *args)
        out[:, 1] *= 1.001
        return out, lse

    with mock.patch.object(ring, "_forward", off):
        train(tmp_path, [RingMonitor(1)])
    (opened, pending) = records(tmp_path).of("event")
    assert (opened.step, opened.detail["kind"], opened.detail["monitor"]) == (2, "deviation", "ring")
    places = {(place["layer"], place["head"]) for place in opened.detail["places"]}
    assert {(layer, 1) for layer in LAYERS} <= places
    assert not any(head == 0 for _, head in places)
    assert "attention across ranks is off: model.blocks." in opened.detail["message"]
    assert pending.detail["id"] == opened.detail["id"] and pending.step == 3


def test_nan_is_an_event_at_once(tmp_path):
    plain = ring._forward

    def broken(plan, *args):
        out, lse = plain(plan, *args)
        out[0, 0] = float("nan")
        return out, lse

    with mock.patch.object(ring, "_forward", broken):
        train(tmp_path, [RingMonitor(1)], steps=1)
    opened = records(tmp_path).of("event")[0]
    assert opened.step == 0 and "NaN or inf in the output" in opened.detail["message"]


def test_a_resume_goes_on_bit_for_bit(tmp_path):
    def trained(folder, steps, fit=None):
        monitor = RingMonitor(2)
        run, module = train(folder, [monitor], steps, fit=fit, dropout=0.0)
        run.save_checkpoint(folder / f"{steps}.ckpt")
        return monitor, module, records(folder).of("ring")

    plain, module, whole = trained(tmp_path / "a", 12)
    trained(tmp_path / "b", 6)
    resumed, again, parts = trained(tmp_path / "b", 12, {"ckpt_path": tmp_path / "b" / "6.ckpt"})
    assert again.losses == module.losses[6:]
    timed = ("work_s", "wait_s", "wait_percent")
    for one, other in zip(whole, parts, strict=True):
        assert one.detail["layers"] == other.detail["layers"]
        assert {k: v for k, v in one.values.items() if "wait" not in k} == {
            k: v for k, v in other.values.items() if "wait" not in k
        }
        for a, b in zip(one.detail["balance"], other.detail["balance"], strict=True):
            assert {k: v for k, v in a.items() if k not in timed} == {
                k: v for k, v in b.items() if k not in timed
            }
    assert resumed.memory() == plain.memory()


def test_what_runs_beside_the_run_is_not_taken_for_it(tmp_path):
    from pytorch_lightning import Callback

    class Beside(Callback):
        def on_before_backward(self, trainer, pl_module, loss):
            with unseen(), streams_kept([]), torch.no_grad():
                pl_module.model(ring_module.batches(1).batches[0][0])

    train(tmp_path / "a", [RingMonitor(1)])
    train(tmp_path / "b", [RingMonitor(1), Beside()])
    plain, beside = (records(tmp_path / name).of("ring") for name in "ab")
    assert [row.detail["layers"] for row in plain] == [row.detail["layers"] for row in beside]


def test_calls_without_a_backward_are_measured_at_the_end_of_theirs(tmp_path):
    from pytorch_lightning import Callback

    class Frozen(Callback):
        def on_train_start(self, trainer, pl_module):
            for name, parameter in pl_module.named_parameters():
                parameter.requires_grad_(name.startswith("model.head"))

    train(tmp_path, [Frozen(), RingMonitor(1)], steps=1)
    (record,) = records(tmp_path).of("ring")
    assert list(record.detail["layers"])[::-1] == LAYERS
    assert "ring/rel_l2" in record.values and not any("grad" in key for key in record.values)


def test_the_report_of_a_run_says_what_was_found(tmp_path):
    train(tmp_path, [RingMonitor(2)])
    told = " ".join(text_report(tmp_path).split())
    assert "Nothing wrong was seen in attention across ranks." in told
    assert "Attention across ranks: nothing wrong: worst" in told
    page = write_report(tmp_path).read_text()
    assert "Work and waiting of each rank" in page


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="RingMonitor: expected rows >= 1, got 0"):
        RingMonitor(rows=0)


def test_loads_of_two_rings_are_told_apart_and_held_against_the_prediction():
    busy, idle = Load(30, 3.0, 1.0, 30.0), Load(10, 1.0, 3.0, 10.0)
    ranks = [Loads({(0, 1): busy}), Loads({(0, 1): idle}), Loads({(2, 3): idle})]
    ranks.append(Loads({(2, 3): replace(idle, predicted=None)}))
    first, second = balances(ranks)
    assert (first["ranks"], first["imbalance"], first["predicted_imbalance"]) == ([0, 1], 1.5, 1.5)
    assert first["wait_percent"] == 75.0
    assert (second["ranks"], second["imbalance"], second["predicted_imbalance"]) == ([2, 3], 1.0, None)
