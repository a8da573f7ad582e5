"""The detector: published series and their verdicts, planted trouble, clean runs, exact resumes."""

import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stabilitykit.numerics.event import Event
from stabilitykit.numerics.spikes import SpikeDetector

DATA = Path(__file__).parents[1] / "data"
NAN = math.nan


def run(rows, detector=None):
    """The final state of each event."""
    detector = detector or SpikeDetector()
    raised = [detector.update(step, loss) for step, loss in rows]
    return list({event.id: event for event in [*raised, *detector.pending] if event}.values())


def brief(rows):
    return [(event.kind, event.start, event.end) for event in run(rows)]


def rows_of(name):
    lines = (DATA / name).read_text().splitlines()[1:]
    return [(int(line.split(",")[0]), float(line.split(",")[1])) for line in lines]


def noisy(steps, level=3.0, noise=0.05, seed=0, begin=0):
    generator = random.Random(seed)
    return [(begin + t, level + generator.gauss(0, noise)) for t in range(steps)]


def plus(rows, change):
    return [(step, loss + change(step)) for step, loss in rows]


# --- published series -------------------------------------------------------------------------------


def test_tr1_13b_spike_is_one_event_not_reopened_while_it_falls():
    rows = rows_of("bigscience_tr1_13b_spike_29050.csv")
    (event,) = run(rows)
    assert (event.kind, event.start, event.onset, event.end) == ("spike", 29050, 29050, None)
    assert (event.peak, event.peak_step) == (8.715872, 29060)
    # The chronicle: about 500 iterations to come back, logged every ten; then it is a spike that ended.
    back = [(29100 + 10 * i, 2.77 + 4 * math.exp(-i / 12)) for i in range(80)]
    assert len(run([*rows, *back])) == 1
    assert run([*rows, *back])[0].end is not None


def test_tr8_104b_divergence_without_a_single_huge_jump():
    (event,) = run(rows_of("bigscience_tr8_104b_exp_6900_diverge.csv"))
    assert (event.kind, event.start, event.end) == ("divergence", 6930, None)


def test_tr8_104b_spike_at_the_third_row_of_an_excerpt():
    assert brief(rows_of("bigscience_tr8_104b_spike_11448.csv")) == [("spike", 11448, None)]


def test_tr8_104b_one_dip_does_not_close_a_divergence():
    rows = rows_of("bigscience_tr8_104b_spike_8741.csv")
    assert brief(rows) == [("divergence", 8741, None)]


# "MinLoRA, reproduction of GPT2 + LoRA", a public README (licence unknown): its 19 logged losses.
MINLORA = [10.9264, 9.8973, 9.0391, 7.8356, 6.6008, 6.0871, 5.8614, 5.6643, 5.3005, 5.0595, 4.8186,
           270.3931, 182.6521, 121.9155, 96.658, 68.6309, 78.4303, 40.0218, 31.0113]  # fmt: skip


def test_minlora_explosion_is_a_divergence_in_fp32_and_nonfinite_in_fp16():
    fp32 = [(10 * i, loss) for i, loss in enumerate(MINLORA)]
    assert brief(fp32) == [("divergence", 110, None)]
    fp16 = [(step, loss if step < 110 else NAN) for step, loss in fp32]
    assert brief(fp16) == [("nonfinite", 110, None)]


def test_a_second_step_spike_at_high_learning_rate_is_a_transient():
    assert brief(rows_of("pgolf_step2_spike_mixedquant.csv")) == [("transient", 2, 400)]


def test_humps_of_start_up_are_one_transient_back_by_step_28():
    (event,) = run(rows_of("megatron_gpt3_moe_50steps_early_bumps.csv"))
    assert (event.kind, event.start, event.peak_step) == ("transient", 13, 25)
    assert event.end is not None


@pytest.mark.parametrize(
    "name",
    [
        "megatron_gpt3_resume_cp2_100steps.csv",  # the noise grows tenfold in sixty rows
        "mn_val_batchsize_schedule.csv",  # a validation loss, better ten steps later
    ],
)
def test_harmless_series_raise_no_alarm(name):
    assert brief(rows_of(name)) == []


def test_mixtral_spikes_logged_every_five_steps():
    found = {event.start for event in run(rows_of("megatron_mixtral8x7b_a100_head.csv"))}
    assert {2425, 3735, 4050, 4575, 5300, 5875} <= found
    assert len(found) <= 9


def test_a_loss_below_one_in_bits_per_byte():
    events = run(rows_of("pgolf_hnet_byte_4h.csv"))
    assert [event.kind for event in events] == ["spike", "spike"]
    assert all(0.9 < event.baseline < 1.05 and event.peak > 1.25 for event in events)


# --- planted trouble --------------------------------------------------------------------------------


def test_one_bad_row_closes_after_ten_rows_back_in_the_band():
    detector = SpikeDetector()
    rows = plus(noisy(500), lambda t: 2.0 * (t == 300))
    said = [(t, event) for t, loss in rows if (event := detector.update(t, loss))]
    assert [t for t, _ in said] == [300, 310]
    opened, closed = said[0][1], said[1][1]
    assert opened.id == closed.id == 1
    assert (opened.kind, opened.end) == ("spike", None)
    assert (closed.kind, closed.start, closed.onset, closed.end) == ("spike", 300, 300, 310)
    assert closed.peak == dict(rows)[300]
    assert closed.baseline == pytest.approx(3.0, abs=0.1)
    assert closed.score == pytest.approx((closed.peak - closed.baseline) / 0.05, rel=0.3)


def test_bands_need_consecutive_rows():
    rows = plus(noisy(400), lambda t: 2.0 * (t in (300, 306, 312)))
    assert brief(rows) == [("spike", 300, 322)]


def test_the_rows_after_a_spike_count_again():
    steep = plus(noisy(200, noise=0.02), lambda t: 6 - 0.03 * t + 2.0 * (t == 100) + 0.4 * (t == 112))
    assert brief(steep) == [("spike", 100, 110), ("spike", 112, 122)]


def test_a_slow_return_is_one_spike():
    rows = plus(noisy(1000), lambda t: 3 * math.exp(-(t - 500) / 60) if t >= 500 else 0)
    ((kind, start, end),) = brief(rows)
    assert (kind, start) == ("spike", 500)
    assert 650 < end < 800


def test_a_plateau_high_up_is_a_divergence_and_dips_do_not_end_it():
    rows = plus(noisy(3000), lambda t: 4.0 * (t >= 1000 and t % 100 > 3))
    assert brief(rows) == [("divergence", 1004, None)]


def test_a_creep_is_a_divergence_with_an_onset_before_its_start():
    rows = plus(noisy(3000), lambda t: 0.001 * max(0, t - 1500))
    (event,) = run(rows)
    assert (event.kind, event.end) == ("divergence", None)
    assert 1500 < event.onset < event.start < 1800


@pytest.mark.parametrize("noise", [0.01, 0.03, 0.1])
def test_a_creep_of_five_percent_in_twenty_thousand_steps_is_one_divergence(noise):
    change = {16_000: 2.0, 19_000: 2.0}
    rows = noisy(24_000, noise=noise)
    rows = plus(rows, lambda t: 0.15 * max(0, t - 4000) / 20_000 + change.get(t, 0))
    slow, *sudden = run(rows)
    assert (slow.kind, slow.end) == ("divergence", None)
    assert 4000 < slow.onset < slow.start < 14_000
    assert [(event.kind, event.start, event.end) for event in sudden if event.start > 4000] == [
        ("spike", 16_000, 16_010),
        ("spike", 19_000, 19_010),
    ]


@pytest.mark.parametrize("noise", [0.003, 0.006, 0.02])
def test_a_quiet_curve_hides_no_slow_rise(noise):
    rows = plus(noisy(3000, noise=noise), lambda t: 0.15 * min(1, max(0, t - 2000) / 300))
    (event,) = run(rows)
    assert event.kind in ("divergence", "shift")
    assert 2000 < event.start < 2250


def test_a_bump_that_no_single_row_shows_is_a_spike():
    rows = plus(noisy(1000), lambda t: 0.32 * math.exp(-(t - 500) / 15) if t >= 500 else 0)
    ((kind, start, end),) = brief(rows)
    assert (kind, end is not None) == ("spike", True)
    assert 500 <= start < 515


def test_a_new_level_on_a_falling_curve_is_a_shift_although_the_loss_comes_back():
    rows = plus(noisy(5000, 0.0, 0.03), lambda t: 1.6 + 4 * (t + 1) ** -0.28 + 0.15 * (t >= 1500))
    (event,) = run(rows)
    assert (event.kind, event.end is not None) == ("shift", True)
    assert 1500 <= event.start < 1530


def test_a_lower_level_is_no_event():
    assert brief(plus(noisy(3000), lambda t: -0.6 * (t >= 1500))) == []


def test_a_new_level_is_a_shift_and_the_baseline_follows():
    rows = plus(noisy(4000), lambda t: 0.25 * (t >= 1500) + 2.0 * (t == 3500))
    (shift, spike) = run(rows)
    assert (shift.kind, shift.end is not None) == ("shift", True)
    assert 1500 <= shift.start < 1550
    assert (spike.kind, spike.start) == ("spike", 3500)
    assert spike.baseline == pytest.approx(3.25, abs=0.1)


def test_a_sudden_new_level_is_a_shift_too():
    ((kind, start, _),) = brief(plus(noisy(3000), lambda t: 0.6 * (t >= 1500)))
    assert (kind, start) == ("shift", 1500)


def test_an_early_spike_that_passes_is_a_transient_and_a_late_one_is_not():
    assert brief(plus(noisy(300), lambda t: 6.0 * (t == 18))) == [("transient", 18, 28)]
    excerpt = plus(noisy(300, begin=90_000), lambda t: 6.0 * (t == 90_018))
    assert brief(excerpt) == [("spike", 90_018, 90_028)]


def test_start_up_and_a_second_row_need_twice_as_much():
    hump = 0.55  # ten sigmas
    assert brief(plus(noisy(300), lambda t: hump * (t == 40))) == []
    assert brief(plus(noisy(300), lambda t: hump * (t == 140))) == [("spike", 140, 150)]
    assert brief([(5000, 2.0), (5001, 2.8)]) == []
    assert brief([(5000, 2.0), (5001, 2.02), (5002, 2.8)]) == [("spike", 5002, None)]


def test_the_first_step_may_be_nonfinite():
    assert brief([(0, NAN), (1, NAN)]) == [("nonfinite", 0, None)]
    assert brief([(0, -math.inf), *noisy(30, begin=1)]) == [("nonfinite", 0, 10)]


def test_one_nan_is_one_event_and_hides_no_later_spike():
    rows = [(t, NAN if t == 200 else loss) for t, loss in plus(noisy(500), lambda t: 6.0 * (t == 300))]
    assert brief(rows) == [("nonfinite", 200, 210), ("spike", 300, 310)]
    twice = [(t, NAN if t in (200, 205) else loss) for t, loss in noisy(300)]
    assert brief(twice) == [("nonfinite", 200, 215)]
    detector = SpikeDetector()
    scores = [(detector.update(t, loss), detector.score)[1] for t, loss in rows]
    assert math.isnan(scores[200])
    assert all(abs(score) < 5 for score in scores[201:300])


def test_nan_is_seen_while_another_event_is_open():
    rows = [(t, NAN if t > 303 else loss) for t, loss in plus(noisy(400), lambda t: 4.0 * (t >= 300))]
    assert brief(rows) == [("divergence", 300, None), ("nonfinite", 304, None)]


def test_all_nan_is_one_event():
    assert brief([(t, NAN) for t in range(50)]) == [("nonfinite", 0, None)]


def test_a_constant_loss_has_no_event_and_its_jump_has():
    constant = [(t, 2.0) for t in range(300)]
    assert brief(constant) == []
    assert brief(plus(constant, lambda t: 0.5 * (t == 200))) == [("spike", 200, 210)]


def test_negative_and_tiny_losses():
    assert brief(plus(noisy(500, level=-2.0), lambda t: 1.0 * (t == 300))) == [("spike", 300, 310)]
    small = noisy(500, level=0.05, noise=0.002)
    assert brief(plus(small, lambda t: 0.05 * (t == 300))) == [("spike", 300, 310)]


def test_going_back_is_a_new_attempt_and_never_a_spike():
    first = [(t, 2 + 6 * math.exp(-t / 100) + loss) for t, loss in noisy(1000, level=0.0)]
    again = [(t, 2 + 6 * math.exp(-t / 100) + loss) for t, loss in noisy(500, level=0.0, seed=1)]
    assert brief([*first, *again]) == []  # concatenated runs: 2 -> 8 at the seam
    assert brief([*first, *first[900:]]) == []  # resumed at 900
    assert brief([*first, (999, 9.0), (999, 2.0)]) == []  # duplicate steps


def test_a_run_that_starts_over_is_not_judged_by_the_noise_of_the_last_one():
    calm = noisy(1000, noise=0.01)
    assert brief([*calm, *noisy(300, noise=0.2, seed=1)]) == []
    resumed = plus(noisy(300, noise=0.01, seed=1, begin=900), lambda t: 0.2 * (t == 903))
    assert brief([*calm, *resumed]) == [("spike", 903, 913)]


def test_an_event_ends_with_its_attempt():
    rows = plus(noisy(320), lambda t: 4.0 * (t >= 300))
    events = run([*rows, *noisy(100, begin=250)])
    assert [(event.kind, event.start, event.end) for event in events] == [("divergence", 300, 319)]


@pytest.mark.parametrize("noise", [0.01, 0.03, 0.1])
def test_a_steep_descent_that_ends_at_a_corner_is_no_event(noise):
    rows = plus(noisy(400, 0.0, noise), lambda t: max(11 - 0.1 * t, 3))
    assert brief(rows) == []
    assert brief(plus(rows, lambda t: 2.0 * (t in (60, 200)))) == [("spike", 60, 70), ("spike", 200, 210)]


def test_gaps_and_changes_of_spacing_are_not_events():
    rows = [*noisy(100), *((100 + 200 * i, loss - 0.5) for i, loss in noisy(100, seed=1))]
    assert brief(rows) == []


# --- clean runs -------------------------------------------------------------------------------------

CURVES = {
    "fast": lambda t: 2.4 + 1.9 * math.exp(-t / 8) + 1.2 * math.exp(-t / 100),
    "warm-up": lambda t: 2.3 + 3.3 / (1 + math.exp((t - 40) / 12)),
    "power": lambda t: 1.6 + 4 * (t + 1) ** -0.28,
    "plateau first": lambda t: 2.4 + 3.1 * math.exp(-max(0, t - 15) / 30),
}


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("noise", [0.02, 0.05, 0.1, 0.15])
def test_three_hundred_steps_of_a_small_gpt(curve, noise):
    for seed in range(8):
        clean = plus(noisy(300, level=0.0, noise=noise, seed=seed), CURVES[curve])
        assert brief(clean) == []
        late = brief(plus(clean, lambda t: 4.0 * (t == 200)))
        assert [(kind, start) for kind, start, _ in late] == [("spike", 200)]
        early = brief(plus(clean, lambda t: 4.0 * (t == 60)))
        assert [(kind, start) for kind, start, _ in early] == [("spike", 60)]


@pytest.mark.parametrize("noise", [0.003, 0.01, 0.1, 0.3])
def test_no_alarm_in_ten_thousand_clean_steps(noise):
    assert brief(plus(noisy(10_000, level=0.0, noise=noise), lambda t: 2 + 3 * math.exp(-t / 500))) == []


@pytest.mark.parametrize("noise", [0.015, 0.03])
def test_no_alarm_on_a_log_rounded_to_one_decimal(noise):
    rows = plus(noisy(5000, level=0.0, noise=noise), lambda t: 2 + 3 * math.exp(-t / 500))
    assert brief([(t, round(loss, 1)) for t, loss in rows]) == []


@pytest.mark.parametrize("keep", [0.5, 0.8, 0.9])
def test_no_alarm_on_a_smoothed_log_and_its_spike_is_found(keep):
    def smooth(rows):
        mean = rows[0][1]
        return [(t, mean := keep * mean + (1 - keep) * loss) for t, loss in rows]

    clean = plus(noisy(4000, 0.0, 0.1), lambda t: 2 + 3 * math.exp(-t / 300))
    assert brief(smooth(clean)) == []
    assert [kind for kind, _, _ in brief(smooth(plus(clean, lambda t: 6.0 * (t == 3000))))] == ["spike"]


def test_no_alarm_on_a_log_that_holds_every_value_for_twenty_rows():
    rows = plus(noisy(4000, 0.0, 0.03), lambda t: 2 + 3 * math.exp(-t / 300))
    assert brief([(t, rows[t - t % 20][1]) for t in range(4000)]) == []
    spiky = plus(rows, lambda t: 0.5 * (t == 3000))
    assert brief([(t, spiky[t - t % 20][1]) for t in range(4000)]) == [("spike", 3000, 3029)]


@pytest.mark.parametrize("held", [4, 20, 100])
@pytest.mark.parametrize("digits", [2, 3, 4])
def test_no_alarm_on_a_held_log_that_is_rounded(held, digits):
    curve = plus(noisy(200, 0.0, 0.03), lambda t: 2 + 3 * math.exp(-t / 30))
    spiky = plus(curve, lambda t: 1.0 * (t == 150))
    for rows, expected in ((curve, []), (spiky, [("spike", 150 * held)])):
        log = [(t, round(rows[t // held][1], digits)) for t in range(200 * held)]
        assert [(kind, start) for kind, start, _ in brief(log)] == expected


@pytest.mark.parametrize("noise", [0.002, 0.004])
def test_a_log_that_is_rounded_to_about_its_noise_shows_a_new_level(noise):
    quiet = plus(noisy(2000, noise=noise), lambda t: 0.15 * (t >= 1500))
    ((kind, start, _),) = brief([(t, round(loss, 2)) for t, loss in quiet])
    assert (kind, start) == ("shift", 1500)


# --- laws -------------------------------------------------------------------------------------------


def eventful():
    """Spike, transient, NaN, seam, slow rise, shift: much of the state is in use somewhere."""

    def change(t):
        return 6.0 * (t in (18, 120)) + 0.4 * (t >= 220) + (NAN if t in (150, 151) else 0)

    return [*plus(noisy(700), change), *noisy(100, begin=650), *plus(noisy(80, begin=800), lambda t: 3)]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 880), st.integers(0, 880))
def test_a_resume_equals_an_uninterrupted_run(one, other):
    rows, cuts = eventful(), {one, other}
    whole, parts = SpikeDetector(), SpikeDetector()
    for number, (step, loss) in enumerate(rows):
        if number in cuts:
            state = json.dumps(parts.state_dict(), allow_nan=False)
            parts = SpikeDetector()
            parts.load_state_dict(json.loads(state))
        a, b = whole.update(step, loss), parts.update(step, loss)
        assert (a and a.to_dict()) == (b and b.to_dict())
        assert whole.score == parts.score or (math.isnan(whole.score) and math.isnan(parts.score))
    assert whole.state_dict() == parts.state_dict()


@settings(max_examples=4, deadline=None)
@given(st.integers(2600, 4900))
def test_a_resume_within_a_creep_equals_an_uninterrupted_run(cut):
    rows = plus(noisy(5000), lambda t: 0.3 * max(0, t - 1000) / 4000 + 2 * (t in (3000, 4000)))
    whole, first, second = SpikeDetector(), SpikeDetector(), SpikeDetector()
    expected = [event and event.to_dict() for event in (whole.update(*row) for row in rows)]
    for row in rows[:cut]:
        first.update(*row)
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    found = [event and event.to_dict() for event in (second.update(*row) for row in rows[cut:])]
    assert found == expected[cut:]
    assert second.state_dict() == whole.state_dict()
    assert sum(event is not None for event in expected) > 3


def test_doubling_loss_and_floor_changes_no_event():
    rows = eventful()
    once = brief(rows)
    doubled = run([(t, 2 * loss) for t, loss in rows], SpikeDetector(floor=2e-3))
    assert [(event.kind, event.start, event.end) for event in doubled] == once
    assert {kind for kind, _, _ in once} >= {"spike", "transient", "nonfinite", "divergence"}


def test_what_was_said_is_copied_and_numbered():
    detector = SpikeDetector()
    said = [event for t, loss in eventful() if (event := detector.update(t, loss))]
    ids = [event.id for event in said]
    assert sorted(set(ids)) == list(range(1, max(ids) + 1))
    said[0].kind = "changed"
    assert all(event.kind != "changed" for event in detector.pending)


def test_an_event_is_json_and_comes_back():
    event = Event(1, "nonfinite", 4, 4, None, NAN, 4, 3.0, math.inf)
    row = json.loads(json.dumps(event.to_dict(), allow_nan=False))
    assert (row["peak"], row["score"], row["end"]) == ("nan", "inf", None)
    assert list(row)[:5] == ["id", "kind", "start", "onset", "end"]
    assert Event.from_dict(row).to_dict() == event.to_dict()


@pytest.mark.parametrize("option", ["threshold", "slack", "drift", "window", "recover", "startup", "floor"])
def test_options_must_be_positive(option):
    with pytest.raises(ValueError, match="above 0, got 0"):
        SpikeDetector(**{option: 0})


def test_memory_is_bounded_also_when_steps_never_increase():
    detector = SpikeDetector()
    for t, loss in plus(noisy(5000), lambda t: 3.0 * (t % 37 == 0)):
        detector.update(t, loss)
    for _ in range(500):
        detector.update(0, NAN)
    assert len(json.dumps(detector.state_dict())) < 12_000
