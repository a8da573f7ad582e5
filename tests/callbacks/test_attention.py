import subprocess
import sys
import textwrap
from importlib import import_module

import pytest
import torch
from torch import nn

import tiny
from stabilitykit import AttentionMonitor
from stabilitykit.catalog import CATALOG
from stabilitykit.observe.attention import worst
from stabilitykit.observe.tap import Tap
from stabilitykit.runlog import read_records

HEALTHY_FLOAT32 = 2e-6


def watch(folder, module=None, steps=4, **options):
    monitor = AttentionMonitor(**{"every_n_steps": 2, **options})
    run = tiny.trainer(folder, [monitor], max_steps=steps)
    run.fit(module or tiny.module_class("pytorch_lightning")(), tiny.batches(steps))
    return read_records(folder / "stability").of("attention")


def test_due_steps_are_recorded_with_every_layer(tmp_path):
    records = watch(tmp_path)
    assert [record.step for record in records] == [1, 3]
    for record in records:
        assert list(record.detail["layers"]) == ["model.blocks.0", "model.blocks.1"]
        assert record.detail["sampled"] == {"heads": 2, "rows": 64, "sequences": 1}
        assert (record.detail["source"], record.detail["golden"]) == ("step", "rounded")
        wanted = {key for key in CATALOG if key.startswith("attention/")}
        assert set(record.values) == wanted
        assert record.values["attention/rel_l2"] < HEALTHY_FLOAT32
        assert record.values["attention/grad_rel_l2"] < HEALTHY_FLOAT32
        numbers = worst(list(record.detail["layers"].values()))
        assert record.values == {key: numbers[key.split("/")[1]] for key in wanted}


def test_under_accumulation_a_due_step_is_one_record(tmp_path):
    run = tiny.trainer(tmp_path, [AttentionMonitor(2)], max_steps=4, accumulate_grad_batches=3)
    run.fit(tiny.module_class("pytorch_lightning")(), tiny.batches(12))
    records = read_records(tmp_path / "stability").of("attention")
    assert [record.step for record in records] == [1, 3]
    assert all("attention/grad_rel_l2" in record.values for record in records)


def test_off_its_steps_it_costs_no_kernel(tmp_path):
    def operations(callbacks):
        torch.manual_seed(0)
        run = tiny.trainer(tmp_path, callbacks, max_steps=3)
        module = tiny.module_class("pytorch_lightning")()
        with tiny.Counted() as counted:
            run.fit(module, tiny.batches(3))
        return counted.count

    plain = operations([])
    assert operations([AttentionMonitor(every_n_steps=100)]) == plain
    assert operations([AttentionMonitor(every_n_steps=3)]) > plain


def test_backward_can_be_left_out(tmp_path):
    values = watch(tmp_path, backward=False)[0].values
    assert "attention/rel_l2" in values
    assert not any("grad" in key for key in values)


def test_modules_and_heads_choose_what_is_measured(tmp_path):
    layers = watch(tmp_path, modules="*.1", heads=[1], rows=3)[0].detail["layers"]
    assert list(layers) == ["model.blocks.1"]
    assert [head["head"] for head in layers["model.blocks.1"]["heads"]] == [1]


def test_a_pattern_that_matches_nothing_lists_the_modules(tmp_path):
    with pytest.raises(ValueError, match=r"'decoder\.\*' matches none of model, model.embed, .*blocks.1"):
        watch(tmp_path, modules="decoder.*")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0}, "expected rows >= 1, got 0"),
        ({"heads": []}, r"expected heads >= 1, got \[\]"),
        ({"sequences": -1}, "expected sequences >= 1, got -1"),
        ({"reference": "bfloat16"}, "expected reference float64 or float32, got 'bfloat16'"),
        ({"budget": "small"}, "expected budget 'auto', got 'small'"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        AttentionMonitor(**options)


def test_a_model_without_attention_is_told_once_and_trains_on(tmp_path):
    module = tiny.module_class("pytorch_lightning")()
    module.model.blocks = nn.ModuleList([nn.Linear(16, 16)])
    with pytest.warns(UserWarning) as said:
        records = watch(tmp_path, module, steps=6)
    ours = [str(w.message) for w in said if "AttentionMonitor" in str(w.message)]
    assert len(ours) == 1
    assert "saw no attention call in this step" in ours[0]
    assert [record.step for record in records] == [1, 3, 5]
    assert all(record.detail["layers"] == {} and record.values == {} for record in records)


def test_a_kernel_whose_dropout_is_not_known_is_recorded_as_skipped(tmp_path, monkeypatch):
    reason = "dropout 0.2 in the kernel, its mask is not known"
    monkeypatch.setattr(
        "stabilitykit.observe.step.unmeasurable",
        lambda call: reason if call.name.endswith("0") else None,
    )
    detail = watch(tmp_path)[0].detail
    assert list(detail["layers"]) == ["model.blocks.1"]
    assert detail["skipped"] == {"model.blocks.0": reason}


def test_attention_that_the_tap_cannot_watch_is_named_in_the_record_and_once_aloud(tmp_path, monkeypatch):
    monkeypatch.setattr(Tap, "unseen", property(lambda self: {"model.blocks.7": "compiled in C++"}))
    with pytest.warns(UserWarning) as said:
        records = watch(tmp_path)
    ours = [str(w.message) for w in said if "AttentionMonitor" in str(w.message)]
    assert len(ours) == 1
    assert "does not see the attention of model.blocks.7: compiled in C++" in ours[0]
    assert [record.detail["skipped"] for record in records] == [{"model.blocks.7": "compiled in C++"}] * 2


def test_heads_that_are_not_there_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"model.blocks.1: expected heads in 0..1, got \[5\]"):
        watch(tmp_path, heads=[0, 5])


@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_scale_of_the_loss_is_what_amp_and_accumulation_make_it(accumulate):
    from types import SimpleNamespace

    from stabilitykit.callbacks.training import loss_scale

    scaler = SimpleNamespace(get_scale=lambda: 1024.0)
    trainer = SimpleNamespace(
        precision_plugin=SimpleNamespace(scaler=scaler), accumulate_grad_batches=accumulate
    )
    module = SimpleNamespace(automatic_optimization=True)
    assert loss_scale(trainer, module) == 1024.0 / accumulate
    trainer.precision_plugin = SimpleNamespace()
    assert loss_scale(trainer, module) == 1.0 / accumulate


def test_log_layers_gives_the_loggers_more_than_the_record(tmp_path):
    from pytorch_lightning.loggers import CSVLogger

    monitor = AttentionMonitor(2, log_layers=True)
    run = tiny.trainer(tmp_path, [monitor], max_steps=2, logger=CSVLogger(tmp_path))
    run.fit(tiny.module_class("pytorch_lightning")(), tiny.batches(2))
    header = next(tmp_path.rglob("metrics.csv")).read_text().splitlines()[0]
    assert "attention/rel_l2/model_blocks_1" in header
    record = read_records(next(tmp_path.rglob("records.jsonl")).parent).of("attention")[0]
    assert set(record.values) <= set(CATALOG)


def test_the_users_exception_closes_the_tap(tmp_path):
    class Failing(tiny.module_class("pytorch_lightning")):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            raise RuntimeError("mine")

    module = Failing()
    with pytest.raises(RuntimeError, match="mine"):
        watch(tmp_path, module, every_n_steps=1)
    assert torch.overrides._get_current_function_mode_stack() == []
    assert not any(child._forward_hooks for child in module.modules())


def gpt2_class(package):
    """A Hugging Face GPT-2 in a user's own LightningModule."""
    from transformers import GPT2Config, GPT2LMHeadModel

    class Mine(import_module(package).LightningModule):
        def __init__(self):
            super().__init__()
            config = GPT2Config(
                vocab_size=tiny.VOCAB, n_positions=32, n_embd=16, n_layer=3, n_head=2,
                attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM",
            )  # fmt: skip
            self.gpt = GPT2LMHeadModel(config)

        def training_step(self, batch, batch_idx):
            return self.gpt(input_ids=batch[0], labels=batch[0]).loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    return Mine


def assert_gpt2_was_watched(folder):
    record = read_records(folder).of("attention")[0]
    assert list(record.detail["layers"]) == [f"gpt.transformer.h.{i}.attn" for i in range(3)]
    for row in record.detail["layers"].values():
        assert row["rel_l2"] < HEALTHY_FLOAT32
        assert row["grad_rel_l2"] < HEALTHY_FLOAT32


@pytest.mark.parametrize("package", tiny.PACKAGES)
def test_hugging_face_gpt2_is_watched_unedited_in_either_trainer(tmp_path, package):
    run = tiny.trainer(tmp_path, [AttentionMonitor(1)], package, max_steps=2)
    run.fit(gpt2_class(package)(), tiny.batches(2))
    assert_gpt2_was_watched(tmp_path / "stability")


@pytest.mark.slow
@pytest.mark.parametrize("package", tiny.PACKAGES)
def test_hugging_face_gpt2_is_watched_through_either_cli(tmp_path, package):
    here = __file__.rsplit("/", 1)[0]
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys, importlib.util
        sys.path.insert(0, {here!r} + "/..")
        spec = importlib.util.spec_from_file_location("parts", {__file__!r})
        parts = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(parts)
        import tiny
        from {package}.cli import LightningCLI
        Mine = parts.gpt2_class({package!r})
        Mine.train_dataloader = lambda self: tiny.batches(2)
        LightningCLI(Mine)
        """)
    )
    args = ["fit", "--trainer.max_steps=2", "--trainer.accelerator=cpu", "--trainer.logger=false"]
    args += ["--trainer.enable_checkpointing=false", f"--trainer.default_root_dir={tmp_path}"]
    args += [
        "--trainer.callbacks+=stabilitykit.AttentionMonitor",
        "--trainer.callbacks.every_n_steps=1",
    ]
    args += ["--trainer.callbacks+=stabilitykit.LossMonitor"]
    run = subprocess.run([sys.executable, str(script), *args], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert_gpt2_was_watched(tmp_path / "stability")
