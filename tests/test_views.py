"""What W&B, TensorBoard and CSV were given, read back from their files and held against records.jsonl."""

import csv
import json
import math
import random
import struct
from importlib import import_module
from io import BytesIO

import numpy as np
import pytest
import torch

import tiny
from stabilitykit import AttentionMonitor, LossMonitor, WeightMonitor
from stabilitykit.records import spell
from stabilitykit.report.images import HEAT_MAPS, heads, paint, tensors
from stabilitykit.runlog import read_records

BROKEN, SPIKE, STEPS = 20, 80, 90
MEDIA = {"attention/heat_map", "weights/heat_map", "loss/events"}


def module(package="pytorch_lightning", fail_at=None):
    class Off(tiny.module_class(package)):
        def training_step(self, batch, batch_idx):
            if batch_idx == fail_at:
                raise RuntimeError("the user's own")
            loss = super().training_step(batch, batch_idx)
            return loss + {BROKEN: math.nan, SPIKE: 20.0}.get(self.trainer.global_step, 0.0)

    return Off()


def monitors():
    return [LossMonitor(), AttentionMonitor(30), WeightMonitor(40, window=3, floor_seeds=1)]


def logger(name, folder, package="pytorch_lightning"):
    found = getattr(import_module(f"{package}.loggers"), name)
    if name == "WandbLogger":
        return found(save_dir=folder, offline=True, project="gpt")
    return found(folder)


def fit(folder, *names, package="pytorch_lightning", max_steps=STEPS, **options):
    loggers = [logger(name, folder, package) for name in names]
    run = tiny.trainer(folder, monitors(), package, logger=loggers or False, max_steps=max_steps)
    try:
        run.fit(module(package, **options), tiny.batches(STEPS))
    finally:
        if "WandbLogger" in names:
            import wandb

            loggers[names.index("WandbLogger")].experiment.finish()
            wandb.teardown()  # the service writes on after finish() returns; it ends here
    return run


def expected(folder):
    """step -> all values of its records, as any logger should have them; and the records."""
    records = read_records(next(folder.rglob("records.jsonl")).parent)
    values = {}
    for record in records.rows:
        values.setdefault(record.step, {}).update(record.values)
    return {step: row for step, row in values.items() if row}, records


def wandb_records(folder):
    """Every record of the one offline run below `folder`: LevelDB's log format, 32 KiB blocks."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = next(folder.rglob("run-*.wandb")).read_bytes(), 7, b""
    while at + 7 <= len(data):
        if at % 32768 > 32768 - 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def wandb_rows(folder):
    """One dict per history row of ours, Lightning's own and W&B's bookkeeping left out."""
    for record in wandb_records(folder):
        if record.WhichOneof("record_type") == "history":
            row = {}
            for item in record.history.item:
                key, *below = item.nested_key or [item.key]
                value = json.loads(item.value_json)
                row[key] = {**row.get(key, {}), below[0]: value} if below else value
            if any(key.split("/")[0] in ("loss", "attention", "weights", "overhead") for key in row):
                yield row


def spelled(row):
    """Equal where the numbers are; nan and infinity by their names, as JSON, CSV and wandb all have some."""
    return {key: str(float(value)) for key, value in row.items()}


@pytest.mark.parametrize("package", tiny.PACKAGES)
def test_three_loggers_hold_the_values_of_the_records_step_by_step(tmp_path, wandb_home, package):
    fit(tmp_path, "WandbLogger", "TensorBoardLogger", "CSVLogger", package=package)
    values, records = expected(tmp_path)
    assert list(values) == list(range(STEPS))
    assert {key.split("/")[0] for row in values.values() for key in row} == {
        "loss", "attention", "weights", "overhead",
    }  # fmt: skip

    rows = list(wandb_rows(tmp_path))
    assert [row["trainer/global_step"] for row in rows] == list(values)  # one row per step, in order
    extra = {"trainer/global_step", "_step", "_runtime", "_timestamp", "epoch"} | MEDIA
    for row in rows:
        ours = {key: value for key, value in row.items() if key not in extra}
        assert spelled(ours) == spelled(values[row["trainer/global_step"]])

    check_csv(tmp_path, values)
    check_tensorboard(tmp_path, values)
    check_wandb_images(tmp_path, rows, records)
    check_wandb_events(tmp_path, rows, records)


def check_csv(folder, values):
    with next(folder.rglob("metrics.csv")).open() as file:
        rows = [row for row in csv.DictReader(file) if row["loss/value"]]
    assert [int(row["step"]) for row in rows] == list(values)
    for row in rows:
        ours = {key: text for key, text in row.items() if text and key not in ("step", "epoch")}
        assert spelled(ours) == spelled(values[int(row["step"])])


def check_tensorboard(folder, values):
    from PIL import Image
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = next(folder.rglob("events.out.tfevents*"))
    events = EventAccumulator(str(path.parent), {"scalars": 0, "images": 0, "tensors": 0}).Reload()
    found = {}
    for key in events.Tags()["scalars"]:
        for point in events.Scalars(key):
            if key not in ("epoch", "hp_metric"):
                found.setdefault(point.step, {})[key] = point.value
    assert found.keys() == values.keys()
    for step, row in values.items():  # TensorBoard keeps float32
        assert spelled(found[step]) == spelled({key: np.float32(value) for key, value in row.items()})
    assert [image.step for image in events.Images("attention/heat_map")] == [29, 59, 89]
    assert [image.step for image in events.Images("weights/heat_map")] == [41, 81]
    _, records = expected(folder)
    with Image.open(BytesIO(events.Images("weights/heat_map")[-1].encoded_image_string)) as image:
        assert np.array_equal(np.asarray(image), drawn("weights", records.of("weights")[-1:]))
    texts = events.Tensors("loss/events/text_summary")
    told = [(text.step, text.tensor_proto.string_val[0].decode()) for text in texts]
    assert told == [(step, message) for step, _, message in opened(records)]


def opened(records):
    """(step, kind, message) of every event as it opened."""
    first = {}
    for record in records.of("event"):
        first.setdefault(record.detail["id"], record)
    return [(r.step, r.detail["kind"], r.detail["message"]) for r in first.values()]


def drawn(kind, rows):
    cells = {}
    for record in rows:
        cells |= {"attention": heads, "weights": tensors}[kind](record.detail)
    return paint(cells, HEAT_MAPS[kind].low, HEAT_MAPS[kind].high)


def check_wandb_images(folder, rows, records):
    from PIL import Image

    for kind, steps in (("attention", [29, 59, 89]), ("weights", [41, 81])):
        key = f"{kind}/heat_map"
        shown = [(row["trainer/global_step"], row[key]) for row in rows if key in row]
        assert [step for step, _ in shown] == steps
        for at, (_, media) in enumerate(shown):
            assert media["caption"] == HEAT_MAPS[kind].caption
            with Image.open(next(folder.rglob("offline-run-*/files")) / media["path"]) as image:
                assert np.array_equal(np.asarray(image), drawn(kind, records.of(kind)[: at + 1]))


def check_wandb_events(folder, rows, records):
    alerts = [r.alert for r in wandb_records(folder) if r.WhichOneof("record_type") == "alert"]
    assert [(a.title, a.text, a.level) for a in alerts] == [
        (f"{kind} at step {step}", message, "ERROR" if kind == "nonfinite" else "WARN")
        for step, kind, message in opened(records)
    ]
    assert [(step, kind) for step, kind, _ in opened(records)] == [(BROKEN, "nonfinite"), (SPIKE, "spike")]
    tables = [(row["trainer/global_step"], row["loss/events"]) for row in rows if "loss/events" in row]
    assert [step for step, _ in tables] == [STEPS - 1]
    path = next(folder.rglob("offline-run-*/files")) / tables[0][1]["path"]
    table = json.loads(path.read_text())
    last = {record.detail["id"]: record.detail for record in records.of("event")}
    assert table["columns"] == list(last[1])
    assert spell(table["data"]) == [list(detail.values()) for detail in last.values()]


def test_what_was_seen_before_an_exception_is_shown_with_the_events(tmp_path, wandb_home):
    with pytest.raises(RuntimeError, match="the user's own"):
        fit(tmp_path, "WandbLogger", fail_at=25)
    values, _ = expected(tmp_path)
    rows = list(wandb_rows(tmp_path))
    assert [row["trainer/global_step"] for row in rows] == list(values) == list(range(25))
    assert [row["trainer/global_step"] for row in rows if "loss/events" in row] == [24]


def test_without_a_logger_the_records_are_all_there(tmp_path):
    fit(tmp_path, max_steps=31)
    values, records = expected(tmp_path)
    assert list(values) == list(range(31))
    assert len(records.of("attention")) == 1


def test_no_view_draws_a_random_number(tmp_path, wandb_home):
    def state():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    seen = []
    for names in ((), ("WandbLogger", "TensorBoardLogger")):
        random.seed(7)
        np.random.seed(7)
        torch.manual_seed(7)
        run = fit(tmp_path / str(len(names)), *names, max_steps=31)
        seen.append((run.lightning_module.losses, state()))
    assert str(seen[0]) == str(seen[1])
