"""Trouble reports of others as series: facts of public threads, each with its right outcome."""

import json
import math
import random
from pathlib import Path

import pytest

from stabilitykit.numerics.history import find_events
from stabilitykit.numerics.spikes import SpikeDetector
from stabilitykit.readers.losses import read_losses

DATA = Path(__file__).parents[1] / "data"


def noisy(steps, level=3.0, noise=0.05, seed=0, begin=0):
    generator = random.Random(seed)
    return [(begin + t, level + generator.gauss(0, noise)) for t in range(steps)]


def brief(rows):
    return [(event.kind, event.start, event.end) for event in find_events(rows)]


def events_of(name):
    return find_events(read_losses(DATA / name).rows)


def test_case_2_tr1_13b_slow_recovery_is_one_event_still_open():
    (event,) = events_of("bigscience_tr1_13b_spike_29050.csv")
    assert (event.kind, event.start, event.end, event.peak_step) == ("spike", 29050, None, 29060)


def test_case_4_a_false_recovery_stays_one_divergence():
    (event,) = events_of("bigscience_tr8_104b_spike_8741.csv")
    assert (event.kind, event.start, event.end) == ("divergence", 8741, None)


def test_case_9_of_two_runs_that_fork_neither_is_called_wrong():
    shared = noisy(500)
    for seed, level in ((1, 3.0), (2, 2.9)):
        assert brief([*shared, *noisy(500, level=level, seed=seed, begin=500)]) == []


def test_case_16_start_up_overflows_leave_the_loss_unflagged():
    # DeepSpeed#931: fp16 skips the first six steps, so their loss does not move.
    rows = [(t, 10.8) for t in range(6)] + [(t, 10.8 - 0.02 * t + x) for t, x in noisy(200, 0.0, begin=6)]
    assert brief(rows) == []


def test_case_17_nan_after_thousands_of_clean_steps():
    (event,) = find_events([*noisy(6000), *((6000 + t, math.nan) for t in range(20))])
    assert (event.kind, event.start, event.end) == ("nonfinite", 6000, None)
    assert event.baseline == pytest.approx(3.0, abs=0.1)


def test_case_19_both_precisions_fail_at_the_same_step():
    # Numbers: see MINLORA in test_spikes.py.
    before = [10.93, 9.9, 9.04, 7.84, 6.6, 6.09, 5.86, 5.66, 5.3, 5.06, 4.82]
    fp32 = list(enumerate([*before, 270.4, 182.7, 121.9, 96.7, 68.6, 78.4, 40.0, 31.0]))
    assert brief(fp32) == [("divergence", 11, None)]
    assert brief([(t, x if t < 11 else math.nan) for t, x in fp32]) == [("nonfinite", 11, None)]


def test_case_24_a_peak_at_step_18_is_a_start_up_transient():
    rows = [(t, 4 + 7 * math.exp(-t / 40) + x + 8 * math.exp(-abs(t - 18))) for t, x in noisy(300, 0.0)]
    ((kind, start, end),) = brief(rows)
    assert kind == "transient"
    assert 16 <= start <= 18
    assert end is not None


def test_case_27_an_update_spike_without_a_loss_spike_is_no_loss_event():
    updates = [(t, 0.01 * (2 if t == 300 else 1) + x / 1000) for t, x in noisy(500, 0.0)]
    assert [start for _, start, _ in brief(updates)] == [300]
    assert brief(noisy(500)) == []


@pytest.mark.parametrize("lost", [0.0, 0.4])
def test_case_34_a_resume_is_no_spike_at_its_seam_whatever_was_lost(lost):
    curve = [(t, 2 + 3 * math.exp(-t / 300) + x) for t, x in noisy(1000, 0.0)]
    again = [(t, loss + lost * math.exp(-(t - 900) / 30)) for t, loss in curve[900:]]
    assert brief([*curve, *again]) == []


def test_case_36_a_first_loss_far_above_ln_v_is_no_spike():
    for first in (22.6, 16.0, 10.8):
        rows = [(t, 3 + (first - 3) * math.exp(-t / 20) + x) for t, x in noisy(400, 0.0)]
        assert brief(rows) == []


def test_case_37_two_runs_of_another_reduction_order_give_the_same_events():
    rows = [(t, x + 2 * (t == 300)) for t, x in noisy(500)]
    draw = random.Random(5)
    other = [(t, x + 1e-6 * draw.gauss(0, 1) * min(10**4, 1.03**t)) for t, x in rows]
    assert brief(rows) == brief(other) == [("spike", 300, 310)]


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("bigscience_tr1_13b_spike_29050.csv", {"spike"}),
        ("bigscience_tr8_104b_exp_6900_diverge.csv", {"divergence"}),
        ("bigscience_tr8_104b_spike_11448.csv", {"spike"}),
        ("bigscience_tr8_104b_spike_8741.csv", {"divergence"}),
        ("megatron_gpt3_moe_50steps_early_bumps.csv", {"transient"}),
        ("megatron_gpt3_resume_cp2_100steps.csv", set()),
        ("megatron_mixtral8x7b_a100_head.csv", {"spike"}),
        ("mn_val_batchsize_schedule.csv", set()),
        ("pgolf_hnet_byte_4h.csv", {"spike"}),
        ("pgolf_step2_spike_mixedquant.csv", {"transient"}),
        ("speedrun_2.csv", {"spike"}),
    ],
)
def test_case_76_published_series_get_their_stated_verdicts(name, kinds):
    assert {event.kind for event in events_of(name)} == kinds


def test_case_106_a_nan_poisons_nothing_that_follows():
    rows = [(t, math.nan if t == 200 else x + 6 * (t == 300)) for t, x in noisy(500)]
    assert brief(rows) == [("nonfinite", 200, 210), ("spike", 300, 310)]


def test_case_107_one_nan_is_one_event_and_the_next_step_is_normal():
    detector = SpikeDetector()
    said = {t: detector.update(t, math.nan if t == 200 else x) for t, x in noisy(400)}
    assert [t for t, event in said.items() if event] == [200, 210]
    assert abs(detector.score) < 5


def test_case_112_bits_below_one_are_judged_by_their_own_noise():
    events = events_of("pgolf_hnet_byte_4h.csv")
    assert [event.start for event in events] == [42800, 47200]


@pytest.mark.parametrize("every", [1, 5, 10, 200, 524_288])
def test_case_114_the_logging_interval_does_not_matter(every):
    rows = [(every * t, x + (t == 300)) for t, x in noisy(500)]
    assert brief(rows) == [("spike", every * 300, every * 310)]


def test_case_114_a_change_of_the_interval_is_no_event():
    dense = noisy(100)
    sparse = [(100 + 200 * t, x) for t, x in noisy(300, seed=1)]
    assert brief([*dense, *sparse]) == []


def test_case_117_train_and_validation_losses_share_no_window(tmp_path):
    # tr8-104B: 7.17 on validation beside 6.44 in training.
    rows = [{"step": t, "loss": x} for t, x in noisy(400, 6.44)]
    rows += [{"step": t, "val_loss": 7.17} for t in range(0, 400, 50)]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in sorted(rows, key=lambda row: row["step"])))
    assert find_events(read_losses(log).rows) == []


def test_case_119_concatenated_runs_are_attempts():
    run = [(t, 2 + 8 * math.exp(-t / 50) + x) for t, x in noisy(600, 0.0)]
    assert brief([*run, *run, *run]) == []
    spiky = [(t, x + 3 * (t == 400)) for t, x in run]
    assert [start for _, start, _ in brief([*spiky, *run, *spiky])] == [400, 400]
