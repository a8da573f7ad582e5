import json
import math

from stabilitykit.callbacks.judge import Judge


def healthy(step):
    return 2.5 + 0.03 * math.sin(7 * step)


def test_events_of_all_three_watches_have_ids_of_their_own():
    judge, told = Judge(), []
    for step in range(200):
        spiking = step == 150
        told += [judge.take_loss(step, 9.0 if spiking else healthy(step))]
        told += [judge.take_gradients(step, 60.0 if spiking else healthy(step))]
        told += [judge.take_scale(step, 1.0 if step >= 150 else 1024.0)]
    told = [event for event in told if event]
    opened = [(event.id, event.kind) for event in told if event.end is None]
    assert opened == [(1, "spike"), (2, "gradient_spike"), (3, "loss_scale")]
    assert sorted((event.id, event.kind) for event in told if event.end is not None) == opened[:2]
    assert [(event.id, event.kind) for event in judge.pending] == opened[2:]


def test_case_36_a_first_loss_far_above_the_logarithm_of_the_vocabulary():
    opened, closed = Judge().initial(0, 16.0, 50304)
    assert (opened.kind, opened.peak, opened.end) == ("initial_loss", 16.0, None)
    assert (closed.id, closed.end) == (opened.id, 0)
    assert round(opened.baseline, 1) == 10.8
    assert Judge().initial(0, math.log(50304), 50304) == []
    assert Judge().initial(0, math.nan, 50304) == []


def test_skipping_ends_after_ten_in_a_row_and_begins_again_with_the_next_spike():
    judge, reasons = Judge(), []
    series = (
        [healthy(step) for step in range(100)] + [9.0] * 14 + [healthy(step) for step in range(30)] + [9.0]
    )
    for step, loss in enumerate(series):
        judge.take_loss(step, loss)
        reasons.append(judge.skip(loss, 1.0))
    assert [step for step, reason in enumerate(reasons) if reason] == [*range(100, 110), 144]


def test_what_is_not_finite_is_skipped_however_long_it_lasts():
    judge = Judge()
    for step in range(40):
        judge.take_loss(step, math.nan)
        assert judge.skip(math.nan, 1.0) == "nonfinite"
    judge.take_loss(40, 2.0)
    assert judge.skip(2.0, math.inf) == "gradient_nonfinite"
    assert judge.skip(2.0, None) is None


def test_a_state_is_json_and_goes_on_as_if_never_cut():
    losses = [healthy(step) for step in range(120)]
    losses[60:64], losses[90] = [9.0] * 4, math.nan

    def told(judge, steps):
        found = []
        for step in steps:
            loss = losses[step]
            found += [judge.take_loss(step, loss), judge.skip(loss, 1.0), judge.spike_score, judge.finite]
            found += [judge.take_gradients(step, abs(loss)), judge.take_scale(step, 8.0)]
        return repr([*found, judge.pending])

    for cut in (59, 61, 62, 91, 110):
        first, second, whole = Judge(), Judge(), Judge()
        told(first, range(cut))
        told(whole, range(cut))
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert told(second, range(cut, 120)) == told(whole, range(cut, 120))
