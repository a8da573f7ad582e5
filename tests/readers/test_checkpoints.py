import json
import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from stabilitykit.readers.checkpoints import read_checkpoint

STATE = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(2.5, dtype=torch.bfloat16)}


class Code:
    def __reduce__(self):
        return (os.system, ("touch ran",))


def values(path):
    return {name: entry.load() for name, entry in read_checkpoint(path).entries.items()}


def holds(path, state=STATE):
    found = values(path)
    return found.keys() == state.keys() and all(found[name].equal(state[name]) for name in state)


@pytest.fixture
def distributed(tmp_path):
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model": STATE, "optimizer": {"m": torch.ones(2)}}, checkpoint_id=tmp_path / "dcp")
    return tmp_path / "dcp"


@pytest.mark.parametrize(
    "wrap", [dict, lambda s: {"state_dict": s, "epoch": 1}, lambda s: {"model": s, "optimizer": {}}]
)
@pytest.mark.parametrize("new", [True, False])
def test_torch_files(tmp_path, wrap, new):
    torch.save(wrap(STATE), tmp_path / "x.pt", _use_new_zipfile_serialization=new)
    assert holds(tmp_path / "x.pt")


def test_safetensors_as_their_own_library_writes_them(tmp_path):
    state = {**STATE, "odd": torch.tensor([1, 2, 3], dtype=torch.float8_e4m3fn), "h": torch.ones(3).half()}
    save_file(state, tmp_path / "x.safetensors")
    found = values(tmp_path / "x.safetensors")
    assert found.keys() == state.keys()
    assert all(found[n].dtype == state[n].dtype and found[n].double().equal(state[n].double()) for n in state)


def test_a_safetensors_value_at_an_odd_byte(tmp_path):
    header = json.dumps(
        {
            "f": {"dtype": "F8_E5M2", "shape": [1], "data_offsets": [0, 1]},
            "x": {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]},
        }
    ).encode()
    raw = len(header).to_bytes(8, "little") + header + b"\0" + torch.tensor([1.5]).numpy().tobytes()
    (tmp_path / "x.safetensors").write_bytes(raw)
    assert values(tmp_path / "x.safetensors")["x"].tolist() == [1.5]


def test_hugging_face_folders_of_bin_shards(tmp_path):
    names = {}
    for name, value in STATE.items():
        torch.save({name: value}, tmp_path / f"{name}.bin")
        names[name] = f"{name}.bin"
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    assert holds(tmp_path)
    (tmp_path / "b.bin").unlink()
    with pytest.raises(ValueError, match=r"expected the shard b.bin that .* names, found no such file"):
        read_checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": {"c": "a.bin"}}))
    with pytest.raises(ValueError, match=r"expected c in .*a.bin, as pytorch_model.bin.index.json says"):
        read_checkpoint(tmp_path)
    index.write_text("{}")
    with pytest.raises(ValueError, match="expected a weight_map"):
        read_checkpoint(tmp_path)


def test_distributed_checkpoints_without_their_optimizer(distributed):
    assert holds(distributed, {f"model.{name}": value for name, value in STATE.items()})


def test_a_distributed_index_that_wants_to_run_code_is_refused(distributed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (distributed / ".metadata").write_bytes(pickle.dumps(Code()))
    with pytest.raises(ValueError, match=r"wants to run code \(posix.system\): refused"):
        read_checkpoint(distributed)
    assert not (tmp_path / "ran").exists()


def test_a_distributed_shard_that_is_cut_off_or_lost(distributed):
    shard = distributed / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:500])
    with pytest.raises(ValueError, match="truncated or foreign"):
        values(distributed)
    shard.unlink()
    with pytest.raises(ValueError, match="is missing"):
        read_checkpoint(distributed)


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5, 0.9, 0.999])
def test_truncated_torch_files_are_one_line(tmp_path, new, share):
    torch.save({"w": torch.arange(500.0)}, tmp_path / "x.pt", _use_new_zipfile_serialization=new)
    raw = (tmp_path / "x.pt").read_bytes()
    (tmp_path / "x.pt").write_bytes(raw[: int(share * len(raw))])
    with pytest.raises(ValueError, match="truncated"):
        read_checkpoint(tmp_path / "x.pt")


@pytest.mark.parametrize("kept", [0, 5, 12, 60, -1])
def test_truncated_safetensors_are_one_line(tmp_path, kept):
    save_file(STATE, tmp_path / "x.safetensors")
    raw = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "x.safetensors").write_bytes(raw[:kept])
    with pytest.raises(ValueError, match=r"truncated|as its header says, got"):
        read_checkpoint(tmp_path / "x.safetensors")


def test_foreign_files_and_folders_are_one_line(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    for path, words in (
        (tmp_path / "notes.txt", "which is neither or is truncated"),
        (tmp_path, "found none of them"),
        (tmp_path / "nowhere", "expected an existing checkpoint"),
    ):
        with pytest.raises(ValueError, match=words):
            read_checkpoint(path)


@pytest.mark.parametrize("new", [True, False])
def test_a_checkpoint_that_wants_to_run_code_is_refused_and_does_not(tmp_path, new, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(2), "x": Code()}, tmp_path / "x.pt", _use_new_zipfile_serialization=new)
    with pytest.raises(ValueError, match=r"wants to run code \(posix.system\): refused"):
        read_checkpoint(tmp_path / "x.pt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        ({"w": torch.ones(2, dtype=torch.int8)}, "expected floating-point weights in .*, got int8 in w"),
        ({"w": torch.ones(2, device="meta")}, "got a meta tensor without any: w"),
        ({"n": torch.tensor(3)}, "expected floating-point weights in .*, found none among 1 tensors"),
        ({"step": 3}, "expected a state dict in .*, or one under .*, got step"),
        (torch.ones(2), "expected a state dict in .*, got Tensor"),
    ],
)
def test_what_holds_no_weights_is_named(tmp_path, saved, words):
    torch.save(saved, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=words):
        read_checkpoint(tmp_path / "x.pt")


def test_tied_tensors_have_one_memory(tmp_path):
    weight = torch.randn(3, 3)
    torch.save({"a": weight, "b": weight, "c": weight.T, "d": weight.clone()}, tmp_path / "x.pt")
    memory = {name: entry.memory for name, entry in read_checkpoint(tmp_path / "x.pt").entries.items()}
    assert memory["a"] == memory["b"]
    assert len(set(memory.values())) == 3
