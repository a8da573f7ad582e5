from typing import Any

from stabilitykit.records import Record
from stabilitykit.report.movers import first_movers, told
from stabilitykit.report.page import text_report, write_report
from stabilitykit.runlog import Records, RunLog, start_attempt

SPIKE: dict[str, Any] = {
    **{"id": 0, "kind": "spike", "start": 200, "onset": 198, "end": None, "peak": 6.0, "peak_step": 200},
    **{"baseline": 2.0, "score": 20.0, "monitor": "LossMonitor"},
}


def look(step: int, every: int = 1, **moved: dict[str, int]) -> Record:
    """A record in which signals are outside, by layer since when; 2 x usual per 10 sigmas."""
    outside = {
        signal: {
            layer: {"value": 4.0, "usual": 2.0, "sigmas": 10.0 + i, "since": since}
            for i, (layer, since) in enumerate(layers.items())
        }
        for signal, layers in moved.items()
    }
    return Record(step, 1, "precursors", {}, {"layers": {}, "moved": outside, "every": every})


def movers(*rows: Record, event: dict[str, Any] = SPIKE) -> list[tuple[str, int, tuple[str, ...]]]:
    found = first_movers(Records(list(rows)), event)
    assert found is not None
    return [(mover.key.partition("/")[2], mover.lead, mover.layers) for mover in found]


def test_case_27_what_moved_first_is_first_with_its_lead() -> None:
    rows = [
        look(197, update_ratio={"b.1": 197}),
        look(198, update_ratio={"b.1": 197, "b.0": 198}, grad_norm={"b.0": 198}),
        look(199, grad_norm={"b.0": 198}),
        look(200, grad_norm={"b.0": 198}, log_z={"(run)": 200}),
        look(201, rms={"b.0": 201}),
    ]
    assert movers(*rows) == [
        ("update_ratio", 3, ("b.1", "b.0")),
        ("grad_norm", 2, ("b.0",)),
        ("log_z", 0, ("(run)",)),
    ]


def test_one_that_has_been_outside_for_long_counts_from_when_it_left() -> None:
    assert movers(look(199, entropy={"b.0": 40})) == [("entropy", 160, ("b.0",))]


def test_what_came_back_long_before_does_not_count() -> None:
    assert movers(look(150, rms={"b.0": 149}), look(199)) == []
    assert movers(look(190, rms={"b.0": 190}), look(199)) == [("rms", 10, ("b.0",))]
    assert movers(look(189, rms={"b.0": 189}), look(199)) == []


def test_of_a_sparse_look_the_last_one_before_the_event_counts() -> None:
    rows = [look(step, every=50, **({"rms": {"b.0": 149}} if step == 149 else {})) for step in (99, 149)]
    assert movers(*rows) == [("rms", 51, ("b.0",))]


def test_of_equal_leads_the_order_of_the_record_stands_and_of_layers_the_farthest() -> None:
    row = look(200, update_ratio={"b.0": 200, "b.1": 200}, grad_norm={"b.0": 200})
    assert movers(row) == [("update_ratio", 0, ("b.1", "b.0")), ("grad_norm", 0, ("b.0",))]


def test_a_run_without_precursors_has_no_table_and_a_quiet_one_says_so() -> None:
    assert first_movers(Records([]), SPIKE) is None
    assert told(Records([]), SPIKE) == ""
    quiet = Records([look(190, every=10), look(200, every=10)])
    assert told(quiet, SPIKE) == (
        "Before the spike at step 200 no signal had left its band (looked at every 10 steps)."
    )


def test_the_sentence() -> None:
    rows = Records(
        [look(200, update_ratio={"b.1": 199}, rms={"b.0": 199}, entropy={"b.0": 200}, log_z={"(run)": 200})]
    )
    assert told(rows, SPIKE) == (
        "Before the spike at step 200, outside their own band: update ratio 1 step before in b.1; RMS 1 step "
        "before in b.0; entropy at the same step in b.0, and 1 more signal."
    )


def test_both_reports_have_it(tmp_path: Any) -> None:
    folder = tmp_path / "stability"
    folder.mkdir()
    start_attempt(folder, {}, None)
    log = RunLog(folder)
    for step in range(190, 205):
        log.write(Record(step, 1, "loss", {"loss/value": 2.0}))
    log.write(look(199, update_ratio={"<b>.1": 199}))
    log.write(Record(200, 1, "event", {}, SPIKE))
    page = write_report(folder).read_text()
    assert "First movers, spike at step 200" in page
    assert "<td>update ratio</td><td>1</td><td>199</td><td>&lt;b&gt;.1</td><td>4</td><td>2</td>" in page
    assert "update ratio 1 step before in <b>.1" in " ".join(text_report(folder).split())
