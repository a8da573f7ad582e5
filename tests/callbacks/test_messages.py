import math

import pytest

from stabilitykit.callbacks.messages import Around, detail_of, message
from stabilitykit.numerics.event import Event


def event(kind="spike", start=150, end=None, peak=7.0, baseline=2.4, onset=None):
    return Event(1, kind, start, start if onset is None else onset, end, peak, start, baseline, 40.0)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (event(), "loss spike at step 150: 7 against a baseline of 2.4"),
        (event(end=161), "loss spike at step 150: 7 against a baseline of 2.4, over at step 161"),
        (event("nonfinite", peak=math.nan), "loss nonfinite at step 150"),
        (event("gradient_spike"), "gradient norm spike at step 150: 7 against a baseline of 2.4"),
        (event("gradient_nonfinite", peak=math.inf), "gradient norm nonfinite at step 150"),
        (
            event("dead_gradient", onset=141, end=170),
            "gradient exactly 0 from step 141 to step 150, before that 2.4, over at step 170",
        ),
        (
            event("loss_scale", peak=16.0, baseline=65536.0, onset=141),
            "loss scale falling at step 150: from 65536 to 16 since step 141",
        ),
        (
            event("initial_loss", start=0, end=0, peak=16.0, baseline=10.83),
            "initial loss 16 is above ln(vocabulary) = 10.83, what an untrained model should have",
        ),
    ],
)
def test_every_kind_has_its_words(told, words):
    assert message(told) == words


def test_it_ends_with_the_command():
    detail = detail_of(event(), Around(advice="stabilitykit fit --config c.yaml"))
    assert detail["message"].endswith(". Resume: stabilitykit fit --config c.yaml")
    assert list(detail)[-1] == "resume"
    assert {"monitor": "LossMonitor", "resume": "stabilitykit fit --config c.yaml"}.items() <= detail.items()


def test_ranks_that_are_not_finite_are_named_with_their_hosts():
    around = Around(losses=[2.0, math.nan, math.inf], hosts=["a", "b", "c"], finite=[149, 2.31])
    detail = detail_of(event("nonfinite"), around)
    assert (detail["rank"], detail["host"]) == (1, "b")
    assert detail["nonfinite_ranks"] == [{"rank": 1, "host": "b"}, {"rank": 2, "host": "c"}]
    assert "; not finite on rank 1 of 3 (b); not finite on rank 2 of 3 (c)" in detail["message"]
    assert "; the last finite loss was 2.31 at step 149" in detail["message"]


def test_of_finite_losses_the_highest_ranks_is_named_and_a_rank_without_one_is_passed_over():
    detail = detail_of(event(), Around(losses=[2.0, None, 12.0], hosts=["a", "b", "c"]))
    assert (detail["rank"], detail["host"]) == (2, "c")
    assert "rank" not in detail_of(event(), Around(losses=[2.0], hosts=["a"]))


def test_case_12_a_declared_change_is_named_for_two_hundred_steps():
    around = Around(markers={90: "new data mix", 400: "later", -60: "long ago"})
    detail = detail_of(event(), around)
    assert detail["markers"] == [{"step": 90, "reason": "new data mix"}]
    assert "; 60 steps after 'new data mix' of step 90" in detail["message"]
    assert "markers" not in detail_of(event(start=291), around)


def test_case_34_an_event_soon_after_a_resume_is_tagged():
    assert detail_of(event(), Around(resumed_at=150))["after_resume"] == 0
    assert "; 60 steps after a resume" in detail_of(event(), Around(resumed_at=90))["message"]
    for resumed_at in (None, 50, 151):
        assert "after_resume" not in detail_of(event(), Around(resumed_at=resumed_at))
