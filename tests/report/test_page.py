import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chromium import browse, browser, drawn
from stabilitykit.records import Record
from stabilitykit.report.page import text_report, write_report
from stabilitykit.runlog import RunLog, start_attempt

HOSTILE = "</script><b id=planted>blocks</b>.0<!--<script>"


def attention(step: int, *names: str) -> Record:
    def numbers(value: float) -> dict[str, float]:
        return {"roundoff_ratio": value, "grad_roundoff_ratio": 1.2, "max_logit": 4.0, "entropy": 0.5}

    layers: dict[str, Any] = {
        name: {"dtype": "bfloat16", **numbers(1.1), "heads": [{"head": step % 3, **numbers(1.1)}]}
        for name in names
    }
    return Record(step, 1, "attention", {}, {"layers": layers})


def weights(step: int, names: tuple[str, ...], arm: str = "float32") -> Record:
    """A window that ends at `step`; the distances of its arm in no arithmetic relation to one another."""
    key = re.sub("[^a-zA-Z0-9]+", "_", arm)
    numbers = {"w1": 2e-6, "rel_l2": 5e-5, "w1_over_floor": 2.1, "rel_l2_over_floor": 2.5}
    tensors = {f"{name}.weight": {"w1": 1e-6, "rel_l2": 4e-5} for name in names}
    detail = {
        "tensors": {arm: {**tensors, "frozen.weight": {"w1": 0.0, "rel_l2": 0.0}}},
        "floor": {"w1": [9e-7, 1e-6, 1.2e-6], "rel_l2": [1.8e-5, 2e-5, 2.4e-5]},
        "verdict": {arm: "above all 3 jitter seeds (p = 1/4)"},
        "forked_at": step - 4,
        "window": 5,
    }
    return Record(step, 1, "weights", {f"weights/{key}/{k}": v for k, v in numbers.items()}, detail)


def spike(step: int, end: int | None) -> Record:
    detail = {"id": 0, "kind": "spike", "start": 20, "onset": 20, "end": end, "peak": 6.1}
    more = {"peak_step": 20, "baseline": 2.6, "score": 14.0, "monitor": "LossMonitor"}
    return Record(step, 1, "event", {}, {**detail, **more, "message": f"spike {HOSTILE}"})


def run_folder(base: Path, *rows: Record, meta: dict[str, Any] | None = None) -> Path:
    folder = base / "stability"
    folder.mkdir(parents=True)
    start_attempt(folder, meta or {"versions": {"torch": "2.13"}, "config": {"a": {"b": 1}}}, None)
    log = RunLog(folder)
    for row in rows:
        log.write(row)
    return folder


def rows_of_a_run(*names: str) -> list[Record]:
    values = [2.0 + (4.1 if step == 20 else 0.01 * (step % 5)) for step in range(40)]
    rows = [
        Record(s, 1, "loss", {"loss/value": v, "loss/grad_norm": 1.0, "loss/score": 0.0})
        for s, v in enumerate(values)
    ]
    cost = {"overhead/loss_percent": 0.2, "overhead/total_percent": 0.2}
    rows += [attention(9, *names), attention(19, *names), Record(39, 1, "overhead", cost)]
    rows += [weights(13, names), weights(23, names)]
    return [*rows, spike(20, None), spike(23, 23)]


@browser
def test_a_browser_draws_every_plot_with_no_error_and_no_request(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, *rows_of_a_run("m.0.attn", "m.1.attn"))
    dom, console, asked = browse(write_report(tmp_path), tmp_path)
    assert console == []
    assert asked == set()
    assert drawn(dom) == 11
    assert "<select" in dom
    assert "1 loss spike, at step 20 (6.1 against a baseline of 2.6), over at step 23." in dom
    assert (folder / "report.html").is_file()


@browser
def test_the_browser_check_sees_an_error_and_a_request(tmp_path: Path) -> None:
    run_folder(tmp_path, *rows_of_a_run("a"))
    page = write_report(tmp_path)
    planted = '<img src="http://127.0.0.1:9/planted.png"><script>planted()</script></body>'
    text = page.read_text().replace("</body>", planted)
    page.write_text(text.replace("img-src data:", "img-src http: data:"))
    _, console, asked = browse(page, tmp_path)
    assert len(console) == 1
    assert "planted is not defined" in console[0]
    assert asked == {"http://127.0.0.1:9/planted.png"}


@browser
def test_hostile_names_stay_text(tmp_path: Path) -> None:
    meta = {"config": {HOSTILE: HOSTILE}}
    rows = [*rows_of_a_run(HOSTILE, "x.1"), weights(33, (HOSTILE, "x"), arm=f"jitter={HOSTILE}")]
    run_folder(tmp_path, *rows, meta=meta)
    dom, console, _ = browse(write_report(tmp_path), tmp_path)
    assert console == []
    assert drawn(dom) == 11
    assert "<b id=" not in dom
    assert "&lt;b id=planted&gt;" in dom


@browser
def test_a_run_with_nothing_but_nan_and_an_empty_attention_record(tmp_path: Path) -> None:
    rows = [Record(step, 1, "loss", {"loss/value": math.nan}) for step in range(9)]
    run_folder(tmp_path, *rows, attention(8))
    dom, console, _ = browse(write_report(tmp_path), tmp_path)
    assert console == []
    assert drawn(dom) == 1
    assert "AttentionMonitor saw no attention call on 1 measured step." in dom


def test_the_page_forbids_every_request_and_asks_for_no_icon(tmp_path: Path) -> None:
    run_folder(tmp_path, *rows_of_a_run("a"))
    page = write_report(tmp_path, tmp_path / "out.html").read_text(encoding="utf-8")
    head = page[: page.index("<style>")]
    assert "default-src 'none'" in head
    assert 'rel="icon" href="data:' in head
    assert '<html lang="en">' in head
    assert f"<title>{tmp_path.parent.name}/{tmp_path.name} " in head
    # Nothing but the escaped end tags may close a script element early.
    assert page.count("</script") == page.count("<script") - page.count("x3cscript") == 3


def test_figures_in_the_page_are_what_the_records_hold(tmp_path: Path) -> None:
    run_folder(tmp_path, *rows_of_a_run(HOSTILE))
    page = write_report(tmp_path).read_text(encoding="utf-8")
    text = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page)
    assert text is not None
    loss = json.loads(text[1])[0]["data"][0]
    assert loss["x"] == list(range(40))
    assert loss["y"][20] == 6.1


def test_the_text_report_of_a_run(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, *rows_of_a_run("m.0.attn", "m.1.attn"))
    with (folder / "records.jsonl").open("a") as file:
        file.write('{"step": 40')
    text = text_report(folder)
    assert text.splitlines()[:8] == [
        "Something was off in the loss, first at step 20; it is over.",
        "",
        "- 1 loss spike, at step 20 (6.1 against a baseline of 2.6), over at step 23.",
        "- Attention: nothing wrong: worst gradient roundoff ratio 1.2 (limit 3 for",
        "  bfloat16) in m.0.attn head 0 at step 9.",
        "- Weights: in 2 windows of 5 steps, the last from step 19, float32 is above all",
        "  3 jitter seeds (p = 1/4) in both (last: 2.5 floors).",
        "",
    ]
    assert "Not readable  1 line of the log" in text
    assert "! records.jsonl:48: a torn last line was skipped (11 characters)" in text
    assert max(map(len, text.splitlines())) <= 80


def test_what_could_not_be_read_is_on_the_page(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, *rows_of_a_run("a"))
    with (folder / "records.jsonl").open("a") as file:
        file.write("<not a record>\n" * 7)
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "records.jsonl:48: an unreadable line was skipped" in page
    assert "<li>and 2 more</li>" in page


def test_a_folder_without_a_readable_record_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a folder with records\.jsonl"):
        write_report(tmp_path)
    folder = run_folder(tmp_path)
    (folder / "records.jsonl").write_text("nothing\n")
    message = r"^expected records in .*records\.jsonl, got none that can be read \(1 skipped\)$"
    for report in (write_report, text_report):
        with pytest.raises(ValueError, match=message):
            report(tmp_path)


def test_fifty_thousand_steps_are_thinned_to_a_page_that_opens(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    rows = (
        Record(s, 1, "loss", {"loss/value": 2 + math.sin(s), "loss/grad_norm": 1.0 + s % 3})
        for s in range(50_000)
    )
    lines = [json.dumps(row.to_json()) + "\n" for row in rows]
    (folder / "records.jsonl").write_text("".join(lines))
    page = write_report(tmp_path)
    assert page.stat().st_size < 3_000_000


def test_the_report_loads_neither_torch_nor_numpy_nor_lightning() -> None:
    heavy = ["torch", "numpy", "wandb", "lightning", "pytorch_lightning", "scipy"]
    code = f"import sys, stabilitykit.report.page; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
