"""What AttentionMonitor takes of a due step: turns, the budget, lack of memory, resume, compiled models."""

import pytest
import torch
from torch import nn

import tiny
from stabilitykit import AttentionMonitor
from stabilitykit.observe.attention import measured
from stabilitykit.runlog import read_records

HEALTHY_FLOAT32 = 2e-6


def watch(folder, module=None, steps=4, **options):
    monitor = AttentionMonitor(**{"every_n_steps": 2, **options})
    run = tiny.trainer(folder, [monitor], max_steps=steps)
    run.fit(module or tiny.module_class("pytorch_lightning")(), tiny.batches(steps))
    return read_records(folder / "stability").of("attention")


def test_every_head_and_row_is_seen_within_the_stated_number_of_due_steps(tmp_path):
    records = watch(tmp_path, wide(), steps=17, every_n_steps=1, heads=2, rows=4, sequences=1)
    looks = {record.detail["budget"]["covered_within"] for record in records}
    # Rows: 1 fixed, the others in 5 turns. Heads: 1 fixed, all in 4 turns, made 7 to share no factor
    # with 5 or 4. Every second look is for a picked head.
    assert looks == {14}
    for start in (0, 3):
        some = records[start : start + 14]
        for name in some[0].detail["layers"]:
            rows = [head for record in some for head in record.detail["layers"][name]["heads"]]
            assert {head["head"] for head in rows} == set(range(4))
            assert {head["head"] for head in rows if "dk_rel_l2" in head} == set(range(4))


def wide():
    """The tiny module with four heads."""
    module = tiny.module_class("pytorch_lightning")()
    module.model.blocks = nn.ModuleList(tiny.Attention(16, 4, 0.1) for _ in range(2))
    return module


def test_after_its_probes_the_budget_spreads_the_layers_of_a_model_too_small_for_its_cost(tmp_path):
    records = watch(tmp_path, steps=12, every_n_steps=1)
    assert all(len(record.detail["layers"]) == 2 for record in records[:9])
    assert [len(record.detail["layers"]) for record in records[9:]] == [1, 1, 1]
    names = [next(iter(record.detail["layers"])) for record in records[9:]]
    assert names[0] == names[2] != names[1]
    assert records[9].detail["budget"] == {"covered_within": 2, "layers_every": 2, "settled": False}


def test_out_of_memory_is_said_and_the_next_due_step_takes_less(tmp_path, monkeypatch):
    from stabilitykit.observe import step

    sizes = []

    def greedy(call, sample, **options):
        sizes.append(len(sample.rows))
        if len(sample.rows) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return measured(call, sample, **options)

    monkeypatch.setattr(step, "measured", greedy)
    with pytest.warns(UserWarning) as said:
        records = watch(tmp_path, steps=8, rows=16)
    assert sizes == [16, 8, 4, 4, 4, 4]  # after a failure the rest of the step is left alone
    ours = [str(w.message) for w in said if "out of memory" in str(w.message)]
    assert len(ours) == 2
    assert "at step 1 with 2 heads and 16 rows" in ours[0]
    assert [len(record.detail["layers"]) for record in records] == [0, 0, 2, 2]
    assert records[0].detail["skipped"] == dict.fromkeys(
        ["model.blocks.0", "model.blocks.1"], "out of memory while it was measured"
    )


def test_another_error_of_ours_is_not_taken_for_memory(tmp_path, monkeypatch):
    def broken(*args, **options):
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr("stabilitykit.observe.step.measured", broken)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        watch(tmp_path)


def test_a_resume_measures_the_same_and_keeps_walks_and_events(tmp_path):
    def trained(folder, steps, **fit):
        monitor = AttentionMonitor(2, heads=1, rows=8, sequences=1)
        run = tiny.trainer(folder, [monitor], max_steps=steps)
        torch.manual_seed(5)
        run.fit(tiny.module_class("pytorch_lightning")(dropout=0.0), tiny.batches(12), **fit)
        run.save_checkpoint(folder / f"{steps}.ckpt")
        return monitor, read_records(folder / "stability").of("attention")

    plain, whole = trained(tmp_path / "a", 12)
    trained(tmp_path / "b", 6)
    resumed, parts = trained(tmp_path / "b", 12, ckpt_path=tmp_path / "b" / "6.ckpt")
    assert [record.step for record in parts] == [1, 3, 5, 7, 9, 11]
    for one, other in zip(whole, parts, strict=True):
        assert one.values == other.values
        assert one.detail == other.detail
    assert resumed.memory()["walk"] == plain.memory()["walk"]
    assert resumed.memory()["deviations"] == plain.memory()["deviations"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("whole", [True, False])
def test_a_compiled_model_is_watched_in_a_shadow_step_and_trains_as_without(tmp_path, whole):
    def trained(folder, callbacks):
        torch.manual_seed(7)
        torch.compiler.reset()
        module = tiny.module_class("pytorch_lightning")(dropout=0.2)
        if not whole:
            module.model = torch.compile(module.model, backend="aot_eager")
        run = tiny.trainer(folder, callbacks, max_steps=4)
        given = torch.compile(module, backend="aot_eager") if whole else module
        run.fit(given, tiny.batches(4))
        return module.losses, [p.detach() for p in module.parameters()], torch.get_rng_state()

    plain = trained(tmp_path / "a", [])
    watched = trained(tmp_path / "b", [AttentionMonitor(2)])
    assert plain[0] == watched[0]
    assert all(torch.equal(a, b) for a, b in zip(plain[1], watched[1], strict=True))
    assert torch.equal(plain[2], watched[2])
    records = read_records(tmp_path / "b" / "stability").of("attention")
    assert [record.detail["source"] for record in records] == ["shadow", "shadow"]
    for record in records:
        assert len(record.detail["layers"]) == 2
        assert record.values["attention/rel_l2"] < HEALTHY_FLOAT32
        assert record.values["attention/grad_rel_l2"] < HEALTHY_FLOAT32
