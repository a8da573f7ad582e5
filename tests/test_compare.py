import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

import tiny
from stabilitykit.cli import main
from stabilitykit.numerics.distance import ALL, distances
from stabilitykit.numerics.wasserstein import wasserstein

KEYS = ["tensor", "numel", "w1", "max_abs", "rel_l2", "cosine"]


class Code:
    def __reduce__(self):
        return (os.system, ("touch ran",))


def compare(capsys, *argv, code):
    assert main(["compare", *map(str, argv), "--format", "json"]) == code
    told = capsys.readouterr()
    return {row["tensor"]: row for row in json.loads(told.out)["results"]}, told.err


def error_of(capsys, *argv):
    assert main(["compare", *map(str, argv)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("stabilitykit: error: ")
    assert told.err.count("\n") == 1
    return told.err


def gpt2(seed=0):
    torch.manual_seed(seed)
    config = GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=40, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def states(tmp_path, change=0.01):
    """One small model, and it again with its first block's attention moved by `change`."""
    torch.manual_seed(1)
    state = tiny.Model().state_dict()
    other = {name: value.clone() for name, value in state.items()}
    other["blocks.0.qkv.weight"] += change
    return state, other


@pytest.fixture
def saved(tmp_path):
    """A state dict saved under a name, as torch saves it."""

    def save(state, name="state.pt"):
        torch.save(state, tmp_path / name)
        return tmp_path / name

    return save


def test_a_checkpoint_against_itself_is_at_zero(capsys, saved, tmp_path):
    path = saved(states(tmp_path)[0])
    rows, told = compare(capsys, path, path, code=0)
    assert list(next(iter(rows.values()))) == KEYS
    assert told == ""
    assert all(
        (row["w1"], row["max_abs"], row["rel_l2"], row["cosine"]) == (0, 0, 0, 1) for row in rows.values()
    )
    assert rows[ALL]["numel"] == sum(p.numel() for p in tiny.Model().parameters())


def test_rows_by_hand_sorted_by_w1_and_one_for_all(capsys, saved):
    a = saved({"x": torch.zeros(3), "y": torch.tensor([3.0, 4.0])}, "a.pt")
    b = saved({"x": torch.zeros(3), "y": torch.tensor([3.0, 4.5])}, "b.pt")
    rows, _ = compare(capsys, a, b, code=1)
    assert list(rows) == ["y", "x", ALL]
    assert rows["y"] == {
        "tensor": "y", "numel": 2, "w1": 0.25, "max_abs": 0.5, "rel_l2": 0.1,
        "cosine": pytest.approx(27 / 29.25**0.5 / 5),
    }  # fmt: skip
    assert (rows[ALL]["numel"], rows[ALL]["w1"], rows[ALL]["rel_l2"]) == (5, 0.1, 0.1)


def test_the_table_has_a_line_per_row(capsys, saved, tmp_path):
    path = saved(states(tmp_path)[0])
    assert main(["compare", str(path), str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == KEYS
    assert len(lines) == 2 + len(states(tmp_path)[0])


def test_the_plot_is_one_html_file(capsys, tmp_path, saved):
    state, other = states(tmp_path)
    a, b = saved(state, "a.pt"), saved(other, "b.pt")
    compare(capsys, a, b, "--plot", tmp_path / "map.html", code=1)
    html = (tmp_path / "map.html").read_text()
    assert "The weights differ: relative L2" in html
    assert "blocks.1" in html


def test_two_hugging_face_folders(capsys, tmp_path):
    model, other = gpt2(), gpt2(1)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "shards", max_shard_size="5KB")
    other.save_pretrained(tmp_path / "two")
    assert (tmp_path / "shards/model.safetensors.index.json").is_file()
    rows, _ = compare(capsys, tmp_path / "one", tmp_path / "shards", code=0)
    assert rows[ALL]["numel"] == model.num_parameters()
    rows, _ = compare(capsys, tmp_path / "one", tmp_path / "two", code=1)
    assert rows["transformer.wte.weight"]["rel_l2"] > 1


def test_a_lightning_checkpoint_against_the_bare_state_dict(capsys, tmp_path, saved):
    module = tiny.module_class("pytorch_lightning")()
    trainer = tiny.trainer(tmp_path, max_steps=1)
    trainer.fit(module, tiny.batches(1))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    bare = module.model.state_dict()
    capsys.readouterr()  # what training said
    rows, told = compare(capsys, tmp_path / "last.ckpt", saved(bare), code=0)
    assert set(rows) == {*bare, ALL}
    assert told == ""


def test_compiled_and_wrapped_names_are_mapped(capsys, tmp_path, saved):  # cases.md 102
    state, other = states(tmp_path)
    plain = saved(state, "plain.pt")
    wrapped = {
        f"module.model._orig_mod.{name}".replace("blocks.0", "blocks.0._orig_mod"): v
        for name, v in other.items()
    }
    rows, _ = compare(capsys, plain, saved({"model": wrapped, "step": 3}, "wrapped.pt"), code=1)
    assert next(iter(rows)) == "blocks.0.qkv.weight"
    assert [name for name, row in rows.items() if row["max_abs"] == 0] == [
        name for name in rows if name not in ("blocks.0.qkv.weight", ALL)
    ]  # what did not move is at exactly 0


def test_distributed_checkpoints(capsys, tmp_path, saved):
    model = tiny.Model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(tiny.batch(0)[0]).sum().backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / "dcp"
        )
    rows, _ = compare(capsys, tmp_path / "dcp", saved(model.state_dict()), code=0)
    assert set(rows) == {*model.state_dict(), ALL}


def test_names_in_one_only_are_named_and_refused(capsys, tmp_path, saved):  # cases.md 102
    state, _ = states(tmp_path)
    a = saved(state, "a.pt")
    b = saved({**{n: v for n, v in state.items() if n != "head.bias"}, "extra": torch.ones(2)}, "b.pt")
    told = error_of(capsys, a, b)
    assert f"only in {a}: head.bias; only in {b}: extra; compare what both have with --allow-missing" in told
    rows, told = compare(capsys, a, b, "--allow-missing", code=0)
    assert "head.bias" not in rows
    assert "extra" not in rows
    assert f"only in {a}: head.bias" in told


def test_nothing_in_common_is_refused_even_when_names_may_miss(capsys, saved):
    a, b = saved({"x": torch.ones(1)}, "a.pt"), saved({"y": torch.ones(1)}, "b.pt")
    assert "expected names that are in both" in error_of(capsys, a, b, "--allow-missing")


def test_tied_weights_are_counted_once(capsys, tmp_path, saved):  # cases.md 101
    model = gpt2()
    tied = saved(model.state_dict(), "tied.pt")
    untied = saved({name: value.clone() for name, value in model.state_dict().items()}, "untied.pt")
    model.save_pretrained(tmp_path / "hf")  # where the head is not written
    for other in (tied, untied, tmp_path / "hf"):
        rows, told = compare(capsys, tied, other, code=0)
        assert rows[ALL]["numel"] == model.num_parameters()
        assert ("lm_head.weight is tied to transformer.wte.weight" in told) == (other.suffix == ".pt")


def test_weights_that_are_tied_in_one_only_are_said(capsys, saved):  # cases.md 101
    model = gpt2()
    tied = saved(model.state_dict(), "tied.pt")
    drifted = saved({**model.state_dict(), "lm_head.weight": model.lm_head.weight.detach() + 1}, "drifted.pt")
    rows, told = compare(capsys, tied, drifted, code=1)
    assert next(iter(rows)) == "lm_head.weight"
    assert "tied to transformer.wte.weight in one checkpoint and not in the other" in told


def test_derived_and_integer_buffers_are_left_out(capsys, saved):  # cases.md 102
    weight = {"w": torch.ones(2)}
    a = saved({**weight, "rotary.inv_freq": torch.ones(4), "bn.num_batches_tracked": torch.tensor(7)}, "a.pt")
    rows, told = compare(capsys, a, saved(weight, "b.pt"), code=0)
    assert set(rows) == {"w", ALL}
    assert "rotary.inv_freq (float32[4]), bn.num_batches_tracked (int64[])" in told


def test_what_is_not_finite_is_counted_and_never_zero(capsys, saved):  # cases.md 94
    bad = torch.tensor([1.0, float("nan"), float("inf"), 2.0])
    a = saved({"x": bad, "y": torch.ones(2)}, "a.pt")
    rows, told = compare(capsys, a, saved({"x": torch.ones(4), "y": torch.ones(2)}, "b.pt"), code=1)
    assert list(rows) == ["x", "y", ALL]
    assert rows["x"]["w1"] == rows[ALL]["w1"] == "nan"
    assert rows["x"]["nonfinite"] == rows[ALL]["nonfinite"] == [2, 0]
    assert rows["y"]["w1"] == 0
    assert "x: not finite: 2 in A, 0 in B" in told
    assert compare(capsys, a, a, code=1)[0]["x"]["w1"] == "nan"


def test_the_floor_of_a_16_bit_cast_stands_beside_the_distance(capsys, saved):  # cases.md 96
    weights = torch.randn(100_000)
    a, b = saved({"w": weights}, "a.pt"), saved({"w": weights.half()}, "b.pt")
    rows, _ = compare(capsys, a, b, code=1)
    assert rows["w"]["w1"] == rows["w"]["cast_floor"] == pytest.approx(1.4e-4, rel=0.1)


def test_shuffled_weights_are_at_w1_zero_and_differ(capsys, saved):  # cases.md 97
    weights = torch.randn(1000)
    a, b = saved({"w": weights}, "a.pt"), saved({"w": weights.flip(0)}, "b.pt")
    rows, _ = compare(capsys, a, b, code=1)
    assert rows["w"]["w1"] == rows[ALL]["w1"] == 0
    assert rows["w"]["max_abs"] > 1


def test_shapes_that_differ_are_named(capsys, saved):
    a, b = saved({"w": torch.ones(2, 3)}, "a.pt"), saved({"w": torch.ones(3, 2)}, "b.pt")
    assert "expected one shape under one name, got w: [2, 3] and [3, 2]" in error_of(capsys, a, b)


def test_a_checkpoint_that_wants_to_run_code_is_refused(capsys, tmp_path, saved, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good = saved({"w": torch.ones(2)}, "good.pt")
    told = error_of(capsys, good, saved({"w": torch.ones(2), "x": Code()}, "bad.pt"))
    assert "wants to run code (posix.system): refused" in told
    assert not (tmp_path / "ran").exists()


def test_neither_lightning_nor_wandb_is_imported(tmp_path, saved):
    path = str(saved({"w": torch.ones(2)}))
    code = (
        "import sys, stabilitykit.cli as cli;"
        f"cli.main(['compare', {path!r}, {path!r}]);"
        "print([m for m in ('pytorch_lightning', 'lightning', 'wandb') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.splitlines()[-1] == "[]"


def test_safetensors_against_torch(capsys, tmp_path, saved):
    state, other = states(tmp_path)
    save_file(state, tmp_path / "a.safetensors")
    save_file({name: value.bfloat16() for name, value in state.items()}, tmp_path / "half.safetensors")
    assert compare(capsys, tmp_path / "a.safetensors", saved(state), code=0)
    rows, _ = compare(capsys, tmp_path / "a.safetensors", saved(other), code=1)
    assert rows["blocks.0.qkv.weight"]["max_abs"] == pytest.approx(0.01, rel=1e-4)
    rows, _ = compare(capsys, tmp_path / "a.safetensors", tmp_path / "half.safetensors", code=1)
    assert all(row["max_abs"] < 0.01 for row in rows.values())


MEASURED = """
import sys, threading, time
from stabilitykit.cli import main
peak = [0]
def watch():
    while True:
        line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
        peak[0] = max(peak[0], int(line.split()[1]))
        time.sleep(0.01)
threading.Thread(target=watch, daemon=True).start()
started = time.perf_counter()
code = main(["compare", *sys.argv[1:], "--format", "json"])
print(code, peak[0] / 2**20, time.perf_counter() - started, file=sys.stderr)
"""


def gpt2_shaped(seed):
    draw = torch.Generator().manual_seed(seed)
    shapes = {"wte": (50257, 768), "wpe": (1024, 768)}
    for layer in range(12):
        widths = {"c_attn": (768, 2304), "c_proj": (768, 768), "fc": (768, 3072), "proj": (3072, 768)}
        shapes |= {f"h.{layer}.{name}": shape for name, shape in widths.items()}
    return {name: 0.02 * torch.randn(shape, generator=draw) for name, shape in shapes.items()}


@pytest.mark.slow
def test_gpt2_shaped_states_stream(tmp_path, capsys):
    for name, seed in (("a", 0), ("b", 1)):
        torch.save(gpt2_shaped(seed), tmp_path / f"{name}.pt")
    files = [str(tmp_path / "a.pt"), str(tmp_path / "b.pt")]
    run = subprocess.run([sys.executable, "-c", MEASURED, *files], capture_output=True, text=True, check=True)
    code, peak_gib, seconds = map(float, run.stderr.split())
    assert code == 1
    assert peak_gib < 1.5
    with capsys.disabled():  # wanted under 60 s; not asserted: it tells of what else the machine does
        print(f"\ncompare of two GPT-2 states: {seconds:.0f} s, {peak_gib:.2f} GiB at its peak")
    rows = {row["tensor"]: row for row in json.loads(run.stdout)["results"]}
    a, b = gpt2_shaped(0), gpt2_shaped(1)
    expected = distances({"wte": a["wte"]}, {"wte": b["wte"]})["wte"]
    assert {key: rows["wte"][key] for key in expected} == pytest.approx(expected, rel=1e-12)
    whole = wasserstein(*(torch.cat([tensor.flatten() for tensor in state.values()]) for state in (a, b)))
    assert rows[ALL]["w1"] == pytest.approx(whole, rel=1e-12)
