import json
from pathlib import Path

import pytest

from stabilitykit.cli import main
from stabilitykit.records import Record, one_line
from stabilitykit.runlog import RunLog

ROOT = Path(__file__).parents[1]


def error_of(capsys, argv):
    code = main(argv)
    told = capsys.readouterr()
    assert code == 2
    assert told.out == ""
    lines = told.err.strip().splitlines()
    assert len(lines) == 1, told.err
    assert lines[0].startswith("stabilitykit: error: ")
    return lines[0]


@pytest.fixture
def run_folder(tmp_path):
    log = RunLog(tmp_path)
    for step in range(60):
        log.write(Record(step, 1, "loss", {"loss/value": 9.0 if step == 50 else 2.5 + 0.01 * (step % 5)}))
    return tmp_path


@pytest.fixture
def loss_csv(tmp_path):
    rows = [f"{i},{9.0 if i == 150 else 2.5 + 0.01 * (i % 7)}" for i in range(200)]
    (tmp_path / "log.csv").write_text("\n".join(["step,loss", *rows]) + "\n")
    return tmp_path / "log.csv"


def test_no_command_or_a_wrong_one_lists_those_there_are(capsys):
    assert main([]) == 2
    assert "dashboard" in capsys.readouterr().out
    assert "(fit, report, spikes, compare, dashboard, study, bench), got 'train'" in error_of(
        capsys, ["train"]
    )


@pytest.mark.parametrize("command", ["fit", "report", "spikes", "compare", "dashboard", "study", "bench"])
def test_every_command_has_help(capsys, command):
    assert main([command, "--help"]) == 0
    told = capsys.readouterr().out
    assert "usage" in told.lower()
    assert "lambda" not in told


def test_report_writes_html_and_prints_text(capsys, run_folder):
    assert main(["report", str(run_folder)]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == run_folder / "report.html"
    assert path.read_text().startswith("<!doctype html>") or "<html" in path.read_text()[:200]
    assert main(["report", str(run_folder), "--format", "text"]) == 0
    assert "60" in capsys.readouterr().out


def test_report_of_nothing_is_one_line(capsys, tmp_path):
    assert f"got {tmp_path}" in error_of(capsys, ["report", str(tmp_path)])
    assert "nowhere" in error_of(capsys, ["report", str(tmp_path / "nowhere")])
    (tmp_path / "records.jsonl").write_text("")
    assert "record" in error_of(capsys, ["report", str(tmp_path)])


def test_spikes_prints_one_json_document(capsys, loss_csv):
    assert main(["spikes", str(loss_csv), "--format", "json"]) == 0
    events = json.loads(capsys.readouterr().out)
    assert [(event["kind"], event["start"]) for event in events] == [("spike", 150)]
    assert list(events[0]) == [
        "id", "kind", "start", "onset", "end", "peak", "peak_step", "baseline", "score", "recurs_every",
    ]  # fmt: skip


def test_spikes_can_fail_a_pipeline(capsys, loss_csv):
    assert main(["spikes", str(loss_csv), "--fail-on-spike"]) == 1
    assert "150" in capsys.readouterr().out
    clean = loss_csv.with_name("clean.csv")
    clean.write_text(loss_csv.read_text().replace("150,9.0", "150,2.5"))
    assert main(["spikes", str(clean), "--fail-on-spike"]) == 0
    assert capsys.readouterr().out == "No event in 200 rows of loss\n"


def test_spikes_reads_our_own_records(capsys, run_folder):
    assert main(["spikes", str(run_folder), "--format", "json"]) == 0
    assert [event["start"] for event in json.loads(capsys.readouterr().out)] == [50]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "empty"),
        ("step,value\n1,2\n", "value"),
        ("step,loss\n1,high\n", "high"),
    ],
)
def test_spikes_names_what_is_wrong_with_the_log(capsys, tmp_path, text, named):
    (tmp_path / "log.csv").write_text(text)
    assert named in error_of(capsys, ["spikes", str(tmp_path / "log.csv")])


def test_unknown_options_are_one_line(capsys, loss_csv):
    assert "--colour" in error_of(capsys, ["spikes", str(loss_csv), "--colour"])
    assert "yaml" in error_of(capsys, ["spikes", str(loss_csv), "--format", "yaml"])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (["--trainer.max_stepz=3"], "max_stepz"),
        (["--model.init_args.depth=3"], "depth"),
        (["--data.init_args.path=/nowhere/at/all"], "/nowhere/at/all"),
        (["--trainer.callbacks.every_n_steps=0"], "every_n_steps"),
        (
            ["--trainer.callbacks+=stabilitykit.AttentionMonitor"],
            "more than one stateful callback of type `AttentionMonitor`",
        ),
        (["--model.init_args.heads=3"], "heads"),
        (["--data.init_args.context=512"], "512"),
    ],
)
def test_a_wrong_recipe_is_one_line(capsys, tmp_path, change, named):
    where = [f"--trainer.default_root_dir={tmp_path}", "--trainer.logger=false", "--trainer.max_steps=1"]
    recipe = ["fit", "--config", str(ROOT / "recipes/gpt-nano.yaml"), *where]
    assert named in error_of(capsys, [*recipe, *change])


def test_a_misspelt_option_of_a_monitor_is_all_that_is_told(capsys, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text((ROOT / "recipes/gpt-nano.yaml").read_text().replace("action: flag", "actoin: flag"))
    told = error_of(capsys, ["fit", "--config", str(recipe)])
    assert told == "stabilitykit: error: stabilitykit.LossMonitor: Option 'actoin' is not accepted"


@pytest.mark.parametrize(
    ("argv", "came"), [([], "nothing"), (["recipes/gpt-nano.yaml"], "recipes/gpt-nano.yaml")]
)
def test_fit_asks_for_a_recipe(capsys, argv, came):
    assert error_of(capsys, ["fit", *argv]).endswith(f"expected --config RECIPE, then options, got {came}")


def test_a_study_with_nowhere_to_write_does_not_begin(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("stabilitykit.studies.deviation.deviation_study", lambda **_: pytest.fail("it began"))
    (tmp_path / "file").touch()
    assert "File exists" in error_of(capsys, ["study", "deviation", "--out", str(tmp_path / "file")])


def test_a_dashboard_without_network_is_one_json_document(capsys):
    assert main(["dashboard", "acme/gpt", "--dry-run"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["entity"], document["project"]) == ("acme", "gpt")
    for wrong in ("acme", "acme/", "/gpt", "a/b/c"):
        assert f"expected ENTITY/PROJECT, got '{wrong}'" in error_of(capsys, ["dashboard", wrong])


def test_a_dashboard_without_a_login_is_one_line(capsys, monkeypatch, wandb_home):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NETRC", str(wandb_home / "nothing"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert "No API key configured" in error_of(capsys, ["dashboard", "acme/gpt"])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["nothing"], "deviation"),
        (["deviation", "--seeds", "one"], "expected --seeds as 3,4,5, got 'one'"),
        (["deviation", "--kernel", "nowhere:f"], "No module named 'nowhere'"),
        (["deviation", "--kernel", "torch:numel"], "expected torch:numel on bfloat16"),
    ],
)
def test_a_study_that_cannot_run_is_one_line(capsys, options, named):
    assert named in error_of(capsys, ["study", *options])


@pytest.mark.slow
def test_the_study_of_deviation_holds_all_its_claims_and_draws_its_page(capsys, tmp_path):
    options = ["--seeds", "3", "--kernel", "torch.nn.functional:scaled_dot_product_attention"]
    assert main(["study", "deviation", *options, "--format", "json", "--out", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["claims"]) == 16
    assert all(claim["holds"] is True for claim in told["claims"])
    mine = [row for row in told["results"] if "approximation" in row]
    assert {row["mask"] for row in mine} == {"none"}
    assert max(row["approximation"] for row in mine) < 1e-12
    assert (tmp_path / "deviation.html").is_file()
    assert json.loads((tmp_path / "deviation.json").read_text())["claims"] == told["claims"]


def test_line_breaks_are_folded():
    assert one_line(ValueError("a\n\n  b")) == "a b"
    assert one_line(KeyboardInterrupt()) == "KeyboardInterrupt"
