"""Logs as people have them: exports, comments, units, colours, encodings, documents."""

import json

import pytest

from stabilitykit.readers.columns import find_loss
from stabilitykit.readers.losses import read_losses

ROWS = [(1, 2.5), (2, 2.4)]


@pytest.fixture
def log(tmp_path):
    def write(text, name="log.csv"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def refused(path, **options):
    with pytest.raises(ValueError, match=r"^expected[^\n]+$") as caught:
        list(read_losses(path, **options).rows)
    return str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "# run 7, lr 1e-3\n#\nstep,loss\n1,2.5\n2,2.4\n",
        "# step loss\n1 2.5\n2 2.4\n",  # numpy.savetxt(..., header="step loss")
        "# run 7\n# step,loss\n1,2.5\n2,2.4\n",
        "   step     loss\n      1   2.5000\n      2   2.4000\n",
        "step,loss (nats)\n1,2.5\n2,2.4\n",
        "Step,Training Loss,Validation Loss\n1,2.5,No log\n2,2.4,2.6\n",
        "step,loss\r\n1,2.5\r\n2, \r\n2,2.4\r\n",
        "step,loss\r1,2.5\r2,2.4\r",
        "step,loss\n1,2.5\n2,2.4\n".encode("utf-16"),  # PowerShell's >
        "lr,epoch,iteration,loss\n0.1,0,1,2.5\n0.1,0,2,2.4\n",
        "_runtime,_step,train/loss,trainer/global_step\n1.5,7,2.5,1\n2.5,8,2.4,2\n2.6,9,,2\n",
    ],
)
def test_tables_of_many_hands_give_the_same_rows(log, text):
    losses = read_losses(log(text))
    assert (list(losses.rows), losses.problems) == (ROWS, [])


def test_a_wandb_export_of_one_run_is_read_and_of_two_asks_which(log):
    head = '"Step","{0} - train/loss","{0} - train/loss__MIN","{0} - train/loss__MAX"'
    one = log(head.format("brisk-sun-7") + '\n"1","2.5","2.4","2.6"\n"2","2.4","2.3","2.5"\n')
    losses = read_losses(one)
    assert (losses.loss_column, losses.step_column) == ("brisk-sun-7 - train/loss", "Step")
    assert list(losses.rows) == ROWS
    two = log('"Step","a - loss","b - loss"\n"1","2.5",""\n"2","2.4",""\n')
    assert "'a - loss', 'b - loss'" in refused(two)
    assert list(read_losses(two, loss="a - loss").rows) == ROWS


def test_an_exact_name_goes_before_one_with_a_unit_or_a_run():
    assert find_loss(["a - loss", "loss (bits)", "train_loss"], None) == "train_loss"
    assert find_loss(["loss (bits)", "loss (nats)"], None) is None
    assert find_loss(["val - val_loss", "loss__MIN"], None) is None


def test_comments_and_a_repeated_header_below_it_are_skipped_and_said(log):
    losses = read_losses(log("# a\nstep,loss\n1,2.5\n# lr halved, resumed\nstep,loss\n2,2.4\n"))
    assert list(losses.rows) == ROWS
    assert losses.problems == [
        "log.csv:4: a comment, the line was skipped",
        "log.csv:5: the header once more, the line was skipped",
    ]


def test_thousands_are_read_in_steps_and_a_decimal_comma_is_refused(log):
    text = 'tokens,loss\n"1,048,576",2.5\n"2,097,152",2.4\n'
    assert list(read_losses(log(text)).rows) == [(1_048_576, 2.5), (2_097_152, 2.4)]
    assert "'2,500'" in refused(log("step;loss\n1;2,500\n"))


def test_sentences_comments_and_binary_files_are_no_tables(log):
    assert "--preset" in refused(log("iter 0: loss 10.9 time 93\niter 1: loss 9.9 time 93\n"))
    assert "--preset" in refused(log("# nothing but a comment\n"))
    assert "binary file" in refused(log(b"\x1f\x8b\x08\x00\x00\x00"))
    assert "binary file" in refused(log(b"PAR1\x15\x04\x15\n"))


def test_colours_and_progress_bars(log):
    titan = "[titan] INFO - \x1b[31mstep: {0}  \x1b[32mloss:  {1}  \x1b[33mmemory: 1GiB\x1b[0m\n"
    text = "".join(titan.format(*row) for row in ROWS)
    pattern = r"step:\s+(?P<step>\d+)\s+loss:\s+(?P<loss>\S+)"
    assert list(read_losses(log(text, "log.txt"), pattern=pattern).rows) == ROWS
    bar = "".join(f"Epoch 0: {t}%| | {t}/100 [00:01<01:39, loss={loss}]\r" for t, loss in ROWS)
    pattern = r"(?P<step>\d+)/\d+ \[.*loss=(?P<loss>[\d.]+)"
    assert list(read_losses(log(bar, "log.txt"), pattern=pattern).rows) == ROWS
    ranked = "".join(f"[rank0]: \x1b[32miter {t}: loss {loss}, time 9ms\x1b[0m\n" for t, loss in ROWS)
    assert list(read_losses(log(ranked, "log.txt"), preset="nanogpt").rows) == ROWS


def test_json_documents_and_nested_keys(log):
    history = [{"loss": loss, "epoch": 0.1, "step": step} for step, loss in ROWS]
    history.insert(1, {"eval_loss": 3.0, "step": 1})
    state = {
        "best_metric": None,
        "global_step": 2,
        "log_history": [*history, {"train_loss": 2.45, "step": 2}],
    }
    for document in (state, history):
        for indent in (None, 2):
            path = log(json.dumps(document, indent=indent), "trainer_state.json")
            assert list(read_losses(path).rows) == ROWS
    lines = "".join(json.dumps({"step": t, "train": {"loss": x, "acc": 0}}) + "\n" for t, x in ROWS)
    for name in ("log.jsonl", "log.json"):
        losses = read_losses(log(lines, name))
        assert (losses.loss_column, list(losses.rows)) == ("train.loss", ROWS)
    assert "'a.b.ce'" in refused(log('{"step": 1, "a": {"b": {"ce": 2}}}\n', "log.jsonl"))
