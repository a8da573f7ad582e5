"""Every kind of log, and every way in which it can be wrong."""

import itertools
import json
import math
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stabilitykit.readers.losses import MOST_PROBLEMS, read_losses
from stabilitykit.records import Record
from stabilitykit.runlog import RunLog

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture
def log(tmp_path):
    def write(text, name="log.csv"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def error(path, **options):
    """The one line said when reading `path` to its end."""
    with pytest.raises(ValueError, match=r"^expected") as caught:
        list(read_losses(path, **options).rows)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- tables -----------------------------------------------------------------------------------------


def test_csv_of_a_published_run():
    losses = read_losses(DATA / "bigscience_tr1_13b_spike_29050.csv")
    rows = list(losses.rows)
    assert (losses.loss_column, losses.step_column, losses.problems) == ("loss", "step", [])
    assert rows[:2] == [(29020, 2.775923), (29030, 2.772822)]
    assert all(type(step) is int for step, _ in rows)


def test_the_step_is_the_first_column_when_none_is_named_so(log):
    losses = read_losses(log("tokens,lr,train_loss\n4194304,1e-3,7.5\n8388608,1e-3,7.25\n"))
    assert (losses.loss_column, losses.step_column) == ("train_loss", "tokens")
    assert list(losses.rows) == [(4194304, 7.5), (8388608, 7.25)]
    assert list(read_losses(log("a,Step,loss\n9,0.5,2\n9,1,3\n")).rows) == [(0.5, 2.0), (1, 3.0)]


def test_a_lone_loss_column_counts_its_rows(log):
    losses = read_losses(log("loss\n2.5\n2.25\n"))
    assert losses.step_column == "row"
    assert list(losses.rows) == [(0, 2.5), (1, 2.25)]


def test_columns_can_be_named(log):
    path = log("step,iteration,loss,ce\n1,10,9,2\n2,20,9,3\n")
    assert list(read_losses(path, loss="ce", step="iteration").rows) == [(10, 2.0), (20, 3.0)]


@pytest.mark.parametrize("mark", [",", "\t", ";"])
def test_separators_and_a_byte_order_mark(log, mark):
    assert list(read_losses(log(f"\ufeffstep{mark} loss\n\n1{mark} 2.5\n")).rows) == [(1, 2.5)]


def test_lightnings_metrics_skip_the_rows_of_other_metrics(log):
    text = "epoch,step,train_loss,val_loss\n0,49,2.5,\n0,49,,2.75\n0,99,2.25,\n"
    assert list(read_losses(log(text, "metrics.csv")).rows) == [(49, 2.5), (99, 2.25)]


def test_lightnings_metrics_are_read_from_their_folder(tmp_path):
    (tmp_path / "version_0").mkdir()
    text = "epoch,step,train_loss_epoch,train_loss_step,val_loss\n0,49,,2.5,\n0,49,2.4,,\n0,49,,,2.75\n"
    (tmp_path / "version_0" / "metrics.csv").write_text(text)
    losses = read_losses(tmp_path)
    assert (losses.loss_column, list(losses.rows)) == ("train_loss_step", [(49, 2.5)])


def test_nan_is_a_value_or_missing(log):
    path = log("step,loss\n1,2.5\n2,nan\n3,NaN\n4,-inf\n5,2\n")
    losses = [loss for _, loss in read_losses(path).rows]
    assert [math.isfinite(loss) for loss in losses] == [True, False, False, False, True]
    assert list(read_losses(path, nan="missing").rows) == [(1, 2.5), (4, -math.inf), (5, 2.0)]


def test_one_row_is_fine(log):
    assert list(read_losses(log("step,loss\n7,2.5")).rows) == [(7, 2.5)]


def test_jsonl_with_rows_of_other_metrics(log):
    rows = [{"eval_loss": 3.5, "step": 0}, {"loss": 2.5, "step": 1}, {"loss": None, "step": 2}]
    text = "\n".join(json.dumps(row) for row in [*rows, {"step": 3, "loss": math.nan}]) + '\n{"step": 4, "l'
    losses = read_losses(log(text, "log.jsonl"))
    assert (losses.loss_column, losses.step_column) == ("loss", "step")
    assert str(list(losses.rows)) == "[(1, 2.5), (3, nan)]"
    assert losses.problems == ["log.jsonl:5: not a JSON object, the line was skipped"]


# --- our own records --------------------------------------------------------------------------------


def test_our_records_by_run_folder_folder_or_file(tmp_path):
    folder = tmp_path / "run" / "stability"
    folder.mkdir(parents=True)
    out = RunLog(folder)
    for attempt, steps in ((1, (0, 1, 2)), (2, (2, 3))):
        for step in steps:
            out.write(Record(step, attempt, "loss", {"loss/value": step + attempt / 10}))
            out.write(Record(step, attempt, "attention", {"attention/rel_l2": 0.5}))
    out.write(Record(4, 2, "loss", {"loss/value": math.nan}))
    expected = "[(0, 0.1), (1, 1.1), (2, 2.2), (3, 3.2), (4, nan)]"
    for path in (folder.parent, folder, folder / "records.jsonl"):
        losses = read_losses(path)
        assert (str(list(losses.rows)), losses.loss_column) == (expected, "loss/value")
    assert next(read_losses(folder, loss="attention/rel_l2").rows) == (0, 0.5)
    assert "'loss/other'" in error(folder, loss="loss/other")
    assert "'attention/rel_l2', 'loss/value'" in error(folder, loss="loss/other")


# --- text -------------------------------------------------------------------------------------------

NANOGPT = """\
number of parameters: 10.65M
step 0: train loss 4.2874, val loss 4.2823
iter 0: loss 4.2649, time 30690.05ms, mfu -100.00%
iter 10: loss nan, time 93.11ms, mfu 12.34%
"""
LLMC_MAIN = (
    "s:0 tel:11.0006\ns:0 eval:0.2419\ns:1 trl:10.9953 lr:0.000001 norm:15.50\ns:2 trl:9.5 lr:1 norm:1\n"
)
LLMC_SCREEN = """\
| train_num_batches     | 19560 |
val loss 11.009
step    1/19560 | loss 11.009463 (+nanz)| norm 15.3 (+nanz)| lr 8.57e-07 | 3056 ms | 171510 tok/s
step    2/19560 | loss -nan (+nanz)| norm nan (+nanz)| lr 1.71e-06 | 2880 ms
step 3: train loss 5.3 (took 1200 ms)
step 4/19560 | train loss 5.25 | norm 1.0
"""
MEGATRON = """\
 > building train, validation, and test datasets for GPT ...
 iteration     6502/  159576 | consumed samples:       216960 | elapsed time per iteration (ms): 31074.1 | learning rate: 5.997E-05 | global batch size:    80 | lm loss: 3.876781E+00 | loss scale: 4096.0 | grad norm: 3246.595 | number of skipped iterations:   0 |
 [2024-04-09 09:51:29] iteration     6503/  159576 | consumed samples: 217040 | lm loss: 3.5E+00 | loss scale: 1.0 |
 validation loss at iteration 6503 | lm loss value: 3.9 | lm loss PPL: 1.0E+01 |
"""  # noqa: E501


@pytest.mark.parametrize(
    ("preset", "text", "rows"),
    [
        ("nanogpt", NANOGPT, "[(0, 4.2649), (10, nan)]"),
        ("llmc", LLMC_MAIN, "[(1, 10.9953), (2, 9.5)]"),
        ("llmc", LLMC_SCREEN, "[(1, 11.009463), (2, nan), (3, 5.3), (4, 5.25)]"),
        ("megatron", MEGATRON, "[(6502, 3.876781), (6503, 3.5)]"),
    ],
)
def test_presets(log, preset, text, rows):
    assert str(list(read_losses(log(text, "train.log"), preset=preset).rows)) == rows


def test_a_pattern_of_ones_own(log):
    path = log("epoch 1 | it=20 | L=2.5\nsaved\nepoch 1 | it=40 | L=2.25\n", "train.log")
    pattern = r"it=(?P<step>\d+) \| L=(?P<loss>\S+)"
    assert list(read_losses(path, pattern=pattern).rows) == [(20, 2.5), (40, 2.25)]


# --- what can be wrong ------------------------------------------------------------------------------


def test_missing_and_empty_files(log, tmp_path):
    assert "existing log, got" in error(tmp_path / "none.csv")
    assert "empty file" in error(log(""))
    assert "empty file" in error(log(" \n\n", "log.txt"), preset="nanogpt")
    assert "found none" in error(log("step,loss\n"))
    assert "found none" in error(log("step,loss\n1,\n"))
    assert "records.jsonl" in error(tmp_path)


def test_no_loss_column_lists_those_there_are(log):
    assert "'step', 'value'" in error(log("step,value\n1,2\n"))
    assert "'step', 'ce'" in error(log('{"step": 1}\n{"ce": 2.0}\n', "log.jsonl"))
    assert "'perplexity'" in error(log("step,loss\n1,2\n"), loss="perplexity")
    assert "'samples'" in error(log("step,loss\n1,2\n"), step="samples")
    assert "and 70 more" in error(log(",".join(f"c{i}" for i in range(100)) + "\n"))
    assert "--preset" in error(log(NANOGPT, "train.log"))
    assert "found none" in error(log("{torn\n", "log.jsonl"))
    assert "a table" in error(log("x" * 200_000))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("step,loss\n1,2.5\n2,high\n", ["'loss'", "'high'", "line 3"]),
        ("step,loss\nfirst,2.5\n", ["'step'", "'first'", "line 2"]),
        ("step,loss\n,2.5\n", ["'step'", "''", "line 2"]),
        ("step,loss\nnan,2.5\n", ["'step'", "'nan'", "line 2"]),
        ('{"step": 1, "loss": [2]}\n', ["'loss'", "[2]", "line 1"]),
        ('{"step": null, "loss": 2}\n', ["'step'", "None", "line 1"]),
    ],
)
def test_text_in_place_of_a_number(log, text, named):
    message = error(log(text))
    assert all(part in message for part in named)


def test_patterns_that_cannot_work(log):
    path = log("hello\n", "train.log")
    assert "'hello'" in error(path, preset="megatron")
    assert "groups" in error(path, pattern=r"loss (\d+)")
    assert "regular expression" in error(path, pattern="(")
    assert "nanogpt, llmc, megatron" in error(path, preset="keras")
    assert "both" in error(path, preset="llmc", pattern="x")
    assert "both" in error(path, preset="llmc", loss="loss")
    assert "'value' or 'missing'" in error(path, nan="zero")


def test_short_rows_and_new_attempts_are_reported(log):
    losses = read_losses(log("step,loss,lr\n1,2.5,1\n2,2.5,1\n1,2.75,1\n2,2"))
    assert list(losses.rows) == [(1, 2.5), (2, 2.5), (1, 2.75)]
    assert losses.problems == [
        "log.csv: step 1 after 2: taken as a new attempt",
        "log.csv:5: 2 of 3 cells, the row was skipped",
    ]


def test_a_file_without_line_breaks_does_not_fill_the_memory(log):
    assert "got one longer than 1,048,576 characters" in error(log("1" * 3_000_000, "log.txt"))
    assert "longer" in error(log("step,loss\n1," + "2" * 3_000_000))


def test_a_folder_of_other_things_says_what_is_in_it(tmp_path):
    (tmp_path / "notes.md").write_text("hello")
    message = error(tmp_path)
    assert "metrics.csv" in message
    assert "found notes.md" in message


@pytest.mark.slow
def test_a_large_log_is_read_in_constant_memory(log):
    path = log("step,loss\n" + "".join(f"{i},2.{i % 1000:03d}\n" for i in range(400_000)))
    tracemalloc.start()
    assert sum(1 for _ in read_losses(path).rows) == 400_000
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_problems_do_not_grow_with_the_file(log):
    losses = read_losses(log("step,loss\n" + "1,2.5\n" * 1000))
    assert len(list(losses.rows)) == 1000
    assert len(losses.problems) == MOST_PROBLEMS + 1
    assert losses.problems[-1] == "more problems are not listed"


# --- laws -------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(allow_nan=False), min_size=1, max_size=20))
def test_csv_and_jsonl_give_back_the_numbers_written(tmp_path_factory, values):
    folder, rows = tmp_path_factory.mktemp("logs"), list(enumerate(values))
    (folder / "a.csv").write_text("step,loss\n" + "".join(f"{i},{loss!r}\n" for i, loss in rows))
    (folder / "a.jsonl").write_text("".join(json.dumps({"step": i, "loss": x}) + "\n" for i, x in rows))
    assert list(read_losses(folder / "a.csv").rows) == rows
    assert list(read_losses(folder / "a.jsonl").rows) == rows


def test_rows_are_read_as_they_are_taken(log):
    rows = read_losses(log("step,loss\n" + "".join(f"{i},2.5\n" for i in range(1000)) + "1000,high\n")).rows
    assert len(list(itertools.islice(rows, 1000))) == 1000
    with pytest.raises(ValueError, match="'high' in line 1002"):
        next(rows)


def test_importing_brings_no_torch_and_no_numpy():
    code = (
        "import sys, stabilitykit.readers.losses, stabilitykit.numerics.history;"
        "print(sorted({'torch', 'numpy', 'lightning', 'pytorch_lightning', 'wandb'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
