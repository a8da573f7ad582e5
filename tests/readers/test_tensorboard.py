"""TensorBoard event files, written by TensorBoard's own writer."""

import struct

import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from stabilitykit.readers.losses import read_losses
from stabilitykit.readers.protobuf import fields

FLOAT, DOUBLE, HALF, STRING = 1, 2, 19, 7


def plain(tag, number):
    return Summary.Value(tag=tag, simple_value=number)


def tensor(tag, **content):
    return Summary.Value(tag=tag, tensor=TensorProto(**content))


def write(folder, events, suffix=""):
    writer = EventFileWriter(str(folder), filename_suffix=suffix)
    for step, *values in events:
        writer.add_event(Event(step=step, summary=Summary(value=values)))
    writer.close()
    return folder


def test_plain_scalars_beside_other_tags(tmp_path):
    events = [
        (0, plain("lr", 1.0)),
        (0, plain("Loss/train", 2.5), plain("grad", 9)),
        (7, plain("Loss/train", 2)),
    ]
    losses = read_losses(write(tmp_path, events))
    assert (losses.loss_column, losses.step_column) == ("Loss/train", "step")
    assert list(losses.rows) == [(0, 2.5), (7, 2.0)]
    assert losses.problems == []


@pytest.mark.parametrize(
    "content",
    [
        {"dtype": FLOAT, "float_val": [2.5]},
        {"dtype": DOUBLE, "double_val": [2.5]},
        {"dtype": FLOAT, "tensor_content": struct.pack("<f", 2.5)},
        {"dtype": DOUBLE, "tensor_content": struct.pack("<d", 2.5)},
        {"dtype": HALF, "tensor_content": struct.pack("<e", 2.5)},
    ],
)
def test_scalars_in_tensor_form(tmp_path, content):
    texts = tensor("text", dtype=STRING, string_val=[b"hello"])
    many = tensor("many", dtype=FLOAT, float_val=[1.0, 2.0])
    assert list(read_losses(write(tmp_path, [(3, texts, many, tensor("loss", **content))])).rows) == [
        (3, 2.5)
    ]


def test_no_loss_lists_the_tags(tmp_path):
    with pytest.raises(ValueError, match=r"found 'step', 'lr', 'perplexity'"):
        read_losses(write(tmp_path, [(0, plain("lr", 1.0)), (0, plain("perplexity", 3.0))]))
    assert list(read_losses(tmp_path, loss="lr").rows) == [(0, 1.0)]


def test_a_resumed_run_is_read_file_after_file_and_of_runs_the_newest(tmp_path):
    run = tmp_path / "lightning_logs" / "version_1"
    write(run, [(0, plain("loss", 3.0)), (1, plain("loss", 2.5))], ".a")
    write(run, [(1, plain("loss", 2.25))], ".b")
    losses = read_losses(run)
    assert list(losses.rows) == [(0, 3.0), (1, 2.5), (1, 2.25)]
    assert "new attempt" in losses.problems[0]
    write(tmp_path / "lightning_logs" / "version_2", [(5, plain("loss", 1.0))])
    newest = read_losses(tmp_path)
    assert list(newest.rows) == [(5, 1.0)]
    assert "version_2" in newest.problems[0]


def test_a_torn_file_gives_what_is_whole(tmp_path):
    write(tmp_path, [(0, plain("loss", 3.0)), (1, plain("loss", 2.5))])
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-9])
    losses = read_losses(file)
    assert list(losses.rows) == [(0, 3.0)]
    assert "torn" in losses.problems[0]


def test_foreign_bytes_are_one_line(tmp_path):
    (tmp_path / "x.tfevents.1").write_bytes(
        b"\x05" + bytes(11) + b"\xff\xff\xff\xff\xff" + bytes(4) + b"abc" * 9
    )
    with pytest.raises(ValueError, match="expected a loss column"):
        read_losses(tmp_path / "x.tfevents.1")


@pytest.mark.parametrize("message", [b"\x80", b"\x0b", b"\x0a\x05ab", b"\x09abc"])
def test_what_is_no_message(message):
    with pytest.raises(ValueError, match="expected"):
        list(fields(message))
