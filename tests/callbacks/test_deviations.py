import json

import pytest

from stabilitykit.callbacks.deviations import Deviations, Judged


def layers(dtype="bfloat16", **heads):
    """Layer "a" with one row per head: h2={"roundoff_ratio": 9.0}."""
    rows = [{"head": int(name[1:]), **numbers} for name, numbers in heads.items()]
    return {"a": {"dtype": dtype, "heads": rows}}


def high(value=9.0):
    return {"roundoff_ratio": value, "dk_roundoff_ratio": 1.0, "nonfinite": 0.0}


def test_three_of_the_last_five_looks_open_one_event_that_names_layer_and_head():
    watched = Deviations()
    seen = [high(), high(1.0), high(), high(1.0), high(4.0)]
    told = [watched.update(step, layers(h2=numbers, h0=high(1.0))) for step, numbers in enumerate(seen)]
    assert [len(events) for events in told] == [0, 0, 0, 0, 1]
    event = told[4][0]
    assert (event["kind"], event["monitor"], event["start"], event["onset"]) == (
        "deviation",
        "attention",
        4,
        0,
    )
    assert (event["peak"], event["baseline"], event["end"]) == (4.0, 3.0, None)
    assert event["message"] == (
        "attention differs from exact attention: a head 2, output roundoff ratio 4 (limit 3 for bfloat16)"
    )
    assert watched.suspects("a") == [2]


def test_two_looks_or_three_of_six_are_none():
    watched = Deviations()
    for step, value in enumerate([9.0, 1.0, 1.0, 9.0, 1.0, 9.0, 1.0, 1.0]):
        assert watched.update(step, layers(h2=high(value))) == []


def test_looks_are_counted_per_number_and_head_not_per_step():
    watched = Deviations()
    dk = {"dk_roundoff_ratio": 9.0}
    for step in range(9):
        on = layers(h1={**dk, "roundoff_ratio": 1.0}) if step % 3 == 0 else layers(h1={"roundoff_ratio": 1.0})
        told = watched.update(step, on)
        assert bool(told) == (step == 6)


def test_a_non_finite_number_is_an_event_at_once():
    told = Deviations().update(7, layers(h0={"roundoff_ratio": float("inf"), "nonfinite": 3.0}))
    assert len(told) == 1
    assert "a head 0, 3 NaN or inf in the output" in told[0]["message"]
    json.dumps(told, allow_nan=False)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_bias_to_either_side_counts(sign):
    watched = Deviations()
    told = [watched.update(step, layers(h0={"delta_bias": sign * 50.0})) for step in range(3)]
    assert told[2][0]["peak"] == sign * 50.0
    assert "delta bias" in told[2][0]["message"]


def test_it_closes_with_the_same_id_when_five_looks_are_clean_and_keeps_the_worst():
    watched = Deviations()
    for step in range(3):
        opened = watched.update(step, layers(h2=high(5.0)))
    assert watched.update(3, layers(h2=high(8.0))) == []
    told = [watched.update(4 + i, layers(h2=high(1.0))) for i in range(5)]
    assert [len(events) for events in told] == [0, 0, 0, 0, 1]
    closed = told[4][0]
    assert (closed["id"], closed["end"], closed["peak"], closed["peak_step"]) == (opened[0]["id"], 8, 8.0, 3)
    assert closed["message"].endswith("within the limits again at step 8")
    assert watched.pending() == []
    assert watched.suspects("a") == []


def test_heads_that_go_over_together_are_one_event_and_later_ones_of_its_layer_join_it():
    watched = Deviations()
    for step in range(3):
        told = watched.update(step, layers(h0=high(4.0), h1=high(7.0)))
    assert len(told) == 1
    assert told[0]["message"].index("head 1") < told[0]["message"].index("head 0")
    for step in range(3, 6):
        assert watched.update(step, layers(h5=high(20.0))) == []
    assert {place["head"] for place in watched.pending()[0]["places"]} == {0, 1, 5}


def test_another_layer_is_another_event():
    watched = Deviations()
    for step in range(3):
        first = watched.update(step, layers(h0=high()))
    for step in range(3, 6):
        second = watched.update(step, {"b": layers(h0=high())["a"]})
    assert first[0]["id"] != second[0]["id"]
    assert "b head 0" in second[0]["message"]


def test_formats_without_a_limit_are_not_judged():
    watched = Deviations()
    for step in range(5):
        assert watched.update(step, layers("float8_e4m3fn", h0=high(1e9))) == []


def test_state_goes_on_where_it_was():
    watched = Deviations()
    watched.update(0, layers(h0=high(), h1={"nonfinite": 2.0}))
    watched.update(1, layers(h0=high()))
    again = Deviations()
    again.load_state_dict(json.loads(json.dumps(watched.state_dict())))
    assert again.state_dict() == watched.state_dict()
    for step in range(2, 9):
        numbers = layers(h0=high(1.0 + 4 * (step < 4)), h1={"nonfinite": 0.0})
        assert again.update(step, numbers) == watched.update(step, numbers)


def test_a_number_of_a_whole_layer_names_no_head():
    judged = {"key_sum": Judged("ring/key_sum", "key sum", True)}
    (event,) = Deviations("ring", "the ring is off", judged).update(4, layers(**{"h-1": {"key_sum": 0.5}}))
    assert event["message"] == "the ring is off: a, key sum 0.5 (limit 0.01 for bfloat16)"
    assert (event["monitor"], event["places"][0]["head"]) == ("ring", None)
