from stabilitykit.records import Record
from stabilitykit.report.reading import events, layers, short_names
from stabilitykit.runlog import Records


def test_a_closing_record_replaces_the_opening_one() -> None:
    def event(step: int, end: int | None, number: int = 0) -> Record:
        detail = {"id": number, "kind": "spike", "start": 5 + number, "end": end, "monitor": "L"}
        return Record(step, 1, "event", {}, detail)

    records = Records([event(6, None, 1), event(5, None), event(8, 8)])
    assert [(e["start"], e["end"]) for e in events(records)] == [(5, 8), (6, None)]


def test_events_of_two_monitors_stay_apart_though_their_ids_are_the_same() -> None:
    rows = [
        Record(3, 1, "event", {}, {"id": 0, "start": 3, "monitor": monitor})
        for monitor in ("LossMonitor", "RingMonitor")
    ]
    assert len(events(Records(rows))) == 2


def test_two_events_may_start_at_one_step() -> None:
    rows = [Record(3, 1, "event", {}, {"id": n, "start": 3, "monitor": "M"}) for n in (0, 1)]
    assert len(events(Records(rows))) == 2


def test_layers_come_in_their_natural_order_with_their_steps() -> None:
    names = ["h.10.attn", "h.2.attn"]
    rows = [
        Record(step, 1, "attention", {}, {"layers": {name: {"rel_l2": step} for name in names}})
        for step in (9, 19)
    ]
    found = layers(rows)
    assert list(found) == ["h.2.attn", "h.10.attn"]
    assert found["h.2.attn"] == [(9, {"rel_l2": 9}), (19, {"rel_l2": 19})]


def test_short_names_stay_different_and_one_name_stays_whole() -> None:
    assert short_names(["model.attn"]) == {"model.attn": "model.attn"}
    assert short_names([]) == {}
    mixed = ["m.encoder.0.attn", "m.decoder.0.attn", "m.decoder.0.cross"]
    assert list(short_names(mixed).values()) == ["encoder.0.attn", "decoder.0.attn", "decoder.0.cross"]
    assert list(short_names(["attn", "attn#2"]).values()) == ["attn", "attn#2"]
