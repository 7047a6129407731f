"""`holdfast plan` as a user calls it.

The table, the plan to paste, and what it says to each bad input.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.unit.forecast.made_forecasts import make_plans, small_device
from typer.testing import CliRunner, Result

from holdfast.cli.main import make_app
from holdfast.cli.plan_output import as_json, as_yaml, print_forecast, print_overview
from holdfast.forecast.plan.forecasting import Forecast
from holdfast.forecast.plan.sharding import Sharding

FACTORIES = Path(__file__).parents[1] / "forecast" / "forecast_factories.py"


def call(*arguments: object, factory: str = "transformer") -> Result:
    shown = ["plan", f"{FACTORIES}:{factory}", *map(str, arguments)]
    return CliRunner().invoke(make_app("plan"), shown)


def refused(*arguments: object, factory: str = "transformer") -> dict[str, Any]:
    result = call(*arguments, "--json", factory=factory)
    assert result.exit_code == 2, result.output
    error: dict[str, Any] = json.loads(result.stdout)["error"]
    return error


def printed(forecast: Forecast, capsys: pytest.CaptureFixture[str]) -> str:
    print_forecast(forecast)
    return capsys.readouterr().out


def test_an_unknown_device_names_the_nearest():
    """Nothing is traced for a device that nobody knows."""
    error = refused("--device", "RTX 4080Ti")
    assert error["rule"] == "H416"
    assert "RTX 4080" in error["limit"]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--precision", "fp8"], "fp32, bf16, fp16"),
        (["--precision", ","], "fp32, bf16, fp16"),
        (["--margin", "much"], "GiB"),
        (["--margin", "-1GiB"], "GiB"),
        (["--device", "L4", "--out", "plan.yaml"], "one device"),
        (["--micro-batch-size", "8", "--global-batch-size", "4"], "part of the global batch"),
        (["--shard", "full"], "number of GPUs"),
        (["--gpus", "2", "--shard", "zero3"], "ddp, zero1, zero2, full"),
        (["--gpus", "8", "--global-batch-size", "12"], "same number"),
        (
            ["--gpus", "8", "--global-batch-size", "32", "--micro-batch-size", "8"],
            "of a GPU, which is 4",
        ),
        (["--set", "context"], "equals sign"),
        (["--set", "batch_size=4"], "its own option"),
        (["--vary", "batch_size"], "its own option"),
        (["--vary", "seq_len=0"], "positive number"),
        (["--vary", "seq_len=a"], "positive number"),
        (["--vary", "seq_len", "--set", "seq_len=4"], "either set or varied"),
    ],
)
def test_options_that_mean_nothing_are_refused_at_once(options, word):
    """Each says what is allowed; none starts a process."""
    error = refused("--device", "T4", *options)
    assert error["rule"] == "H421"
    assert word in error["limit"]


def test_the_table_tells_each_plan_and_what_to_take(capsys):
    """Every row is in the table.

    The recommended plan is given as a policy, and what was assumed with its lines.
    """
    forecast = make_plans(small_device(400))
    (plan,) = forecast.plans
    shown = printed(forecast, capsys)
    best = plan.best
    assert best is not None
    assert sum(line.startswith("│ fp32") for line in shown.splitlines()) == len(plan.rows) == 2
    assert (
        f"Policy(precision='fp32', recompute={list(best.modules) or True!r},"
        " micro_batch_size='auto'" in shown
    )
    assert f"forecast_micro_batch_size={best.micro_batch_size})" in shown
    assert "0.98 GiB" in shown
    assert "+0.10%" in shown
    assert "(at model.py:31 in forward, model.py:40 in forward)" in shown
    assert "CatVTON" in shown  # where the figures of the device are from
    assert "lines: model.py:7 in forward" in shown


def test_nothing_fits_says_what_would_do(capsys):
    """By how much it misses, and what it would need."""
    forecast = make_plans(small_device(60, "tiny"))
    (plan,) = forecast.plans
    assert plan.best is None
    shown = printed(forecast, capsys)
    assert "Nothing fits tiny" in shown
    assert "it has 60.0 MiB" in shown
    assert "[H420]" in shown
    facts = as_json(forecast)["devices"][0]
    assert facts["recommended"] is None
    assert facts["missing_bytes"] == plan.shown.missing_bytes > 0


def test_the_overview_has_a_line_per_device(capsys):
    """A device that is too small is named with what it lacks, and another with its micro-batch."""
    forecast = make_plans(small_device(60, "tiny"), small_device(400, "large"))
    print_overview(forecast)
    lines = capsys.readouterr().out.splitlines()
    (tiny,) = [line for line in lines if "tiny" in line]
    (large,) = [line for line in lines if "large " in line and "largest" not in line]
    best = forecast.plans[1].best
    assert best is not None
    assert "no" in tiny.split()
    assert "short" in tiny
    assert {"yes", str(best.micro_batch_size)} <= set(large.split())


def test_without_a_device_common_ones_are_forecast():
    """The exit code is 0 if a step fits any of them."""
    result = call("--json", "--precision", "fp32")
    assert result.exit_code == 0, result.output
    devices = {row["device"] for row in json.loads(result.stdout)["rows"]}
    assert {"T4", "A100-80GB", "H200"} <= devices


def test_json_holds_every_figure():
    """The rows of all devices in one list, owners that add up to the peak, the policy and where
    figures are from.
    """
    forecast = make_plans(small_device(400, "one"), small_device(800, "two"))
    shown = json.loads(json.dumps(as_json(forecast)))
    assert {row["device"] for row in shown["rows"]} == {"one", "two"}
    assert min(row["relative_time"] for row in shown["rows"] if row["micro_batch_size"]) == 1.0
    for device, plan in zip(shown["devices"], forecast.plans, strict=True):
        assert plan.best is not None
        assert sum(device["owners"]["owners"].values()) <= plan.best.live_bytes
        assert sum(device["owners"]["owners"].values()) > 0.99 * plan.best.live_bytes
        assert device["recommended"]["policy"] == plan.best.policy()
        assert device["sources"]
        assert device["verified"]["fits"] is True


def test_yaml_is_the_policy_and_nothing_else():
    """What is no field stands in comments; the fields are those of the recommended plan."""
    forecast = make_plans(small_device(400))
    best = forecast.plans[0].best
    assert best is not None
    text = as_yaml(forecast)
    assert yaml.safe_load(text) == best.policy()
    assert text.startswith(
        '# holdfast plan train.py:build --device "T4" --precision fp32 --global-batch-size 64'
        " --margin 0MiB\n"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("prepared_forecasts")
def test_a_plan_is_made_and_written(tmp_path):
    """A real job: traced in children, planned, traced once more within 0.5 %, written as a
    policy.
    """
    out = tmp_path / "plan.yaml"
    result = call(
        "--device",
        "1500MiB",
        "--global-batch-size",
        4096,
        "--margin",
        "100MiB",
        "--precision",
        "bf16",
        "--out",
        out,
        "--json",
    )
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    (device,) = shown["devices"]
    assert 1 <= device["recommended"]["micro_batch_size"] < 4096
    assert device["verified"]["fits"]
    assert abs(device["verified"]["error"]) < 0.005
    assert {row["recompute"] for row in shown["rows"]} == {"none", "all"}
    assert any("forecast_factories.py" in line for line in device["owners"]["lines"])
    assert yaml.safe_load(out.read_text()) == device["recommended"]["policy"]


@pytest.mark.slow
@pytest.mark.usefixtures("prepared_forecasts")
def test_the_largest_sequence_length_is_found(tmp_path):
    """Sequences of this length fit when traced, with attention scores that grow with the square."""
    out = tmp_path / "plan.yaml"
    options = ["--vary", "seq_len=16", "--micro-batch-size", "8", "--set", "width=32"]
    result = call(
        *["--device", "1GiB", "--margin", "100MiB", "--precision", "fp32", "--json"],
        *[*options, "--out", out],
        factory="of_length",
    )
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    (device,) = shown["devices"]
    assert shown["varied"] == "seq_len"
    assert shown["arguments"] == {"width": 32}
    assert device["recommended"]["value"] % 16 == 0
    # The scores of 4 heads are kept for the backward pass: 4 bytes each, for 8 samples.
    assert device["recommended"]["live_bytes"] > 8 * 4 * 4 * device["recommended"]["value"] ** 2
    assert device["verified"]["fits"]
    assert abs(device["verified"]["error"]) < 0.005
    assert device["recommended"]["policy"]["micro_batch_size"] == 8
    assert "--vary seq_len=16" in out.read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("prepared_forecasts")
@pytest.mark.parametrize(
    ("factory", "option", "rule", "words"),
    [
        ("of_length", ["--vary", "context"], "H421", "seq_len, width"),
        ("mlp", ["--set", "seq_len=3"], "H421", "it has none"),
        ("of_depth", ["--vary", "depth=1"], "H425", "same operations"),
    ],
)
def test_a_parameter_that_cannot_be_set_or_varied_is_refused(factory, option, rule, words):
    """The error lists the parameters of the factory, or says what differs."""
    error = refused("--device", "T4", "--precision", "fp32", *option, factory=factory)
    assert error["rule"] == rule
    assert words in error["limit"]


@pytest.mark.slow
@pytest.mark.usefixtures("prepared_forecasts")
def test_a_model_that_limits_the_parameter_is_named_as_such():
    """The device has room for more than the model allows."""
    options = ["--device", "2GiB", "--margin", "1GiB", "--precision", "fp32"]
    error = refused(*options, "--vary", "seq_len=16", factory="of_limited_length")
    assert error["rule"] == "H414"
    assert "64 positions" in error["what"]
    assert "would fit" in error["what"]
    assert "--set seq_len" in error["fix"]


@pytest.mark.slow
@pytest.mark.usefixtures("prepared_forecasts")
def test_a_fixed_micro_batch_needs_more_memory_if_gradients_are_accumulated():
    """The gradients of earlier micro-batches are kept while the next ones are computed."""
    options = ["--device", "L4", "--precision", "fp32", "--micro-batch-size", "4", "--json"]

    def live_bytes(*more: str) -> int:
        result = call(*options, *more, factory="mlp")
        assert result.exit_code == 0, result.output
        (device,) = json.loads(result.stdout)["devices"]
        assert abs(device["verified"]["error"]) < 0.005
        return device["recommended"]["live_bytes"]

    assert live_bytes("--global-batch-size", "8") > live_bytes()


def test_the_output_names_what_was_asked_for(capsys):
    """A fixed micro-batch that does not fit is named with its size."""
    forecast = make_plans(small_device(60, "tiny"), micro_batch_size=3)
    shown = printed(forecast, capsys)
    assert "not even one micro-batch of 3 samples" in shown
    print_overview(forecast)
    assert "micro-batches of 3 samples" in capsys.readouterr().out


def test_the_share_of_each_gpu_is_shown(capsys):
    """Parts and buffers of the model states, and a margin as on a device without measurements."""
    forecast = make_plans(small_device(400), sharding=Sharding(gpus=8, kind="full"))
    shown = printed(forecast, capsys)
    assert "Each of 8 GPUs holds" in shown
    assert "(1/8 of" in shown
    (device,) = as_json(forecast)["devices"]
    for share in device["state_shares"]:
        assert share["gpu_bytes"] == -(-share["whole_bytes"] // 8)
    assert forecast.plans[0].target.global_batch_size == 64 // 8
    assert "ZeRO" in " ".join(each.what for each in forecast.plans[0].trace.assumptions)
    assert "--gpus 8 --shard full" in as_yaml(forecast)


@pytest.mark.slow
@pytest.mark.usefixtures("prepared_forecasts")
def test_a_sharded_step_is_traced_and_verified():
    """The optimizer states of AdamW are divided, and the forecast holds when traced again."""
    options = ["--device", "H100", "--precision", "fp32", "--micro-batch-size", "4", "--json"]
    result = call(*options, "--gpus", "4", "--shard", "zero1", factory="mlp")
    assert result.exit_code == 0, result.output
    (device,) = json.loads(result.stdout)["devices"]
    shares = {share["state"]: share for share in device["state_shares"]}
    parameters = shares["parameters"]["whole_bytes"]
    assert shares["gradients"]["buffer_bytes"] == shares["gradients"]["gpu_bytes"] == parameters
    # AdamW has two states of the size of the parameters, and a step count for each of them.
    assert shares["optimizer state"]["gpu_bytes"] == pytest.approx(parameters / 2, rel=0.01)
    assert abs(device["verified"]["error"]) < 0.005
    assert device["recommended"]["margin_bytes"] > 0.2 * device["usable_bytes"]


@pytest.mark.slow
def test_a_device_too_small_is_exit_code_1(tmp_path):
    """The table is printed all the same, then what is missing; the child is started as a user's."""
    result = call(
        "--device", "1GiB", "--margin", "900MiB", "--precision", "fp32", "--out", tmp_path / "p"
    )
    assert result.exit_code == 1, result.output
    assert "[H420]" in result.stdout
    assert not (tmp_path / "p").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("prepared_forecasts")
@pytest.mark.parametrize(("factory", "rule"), [("needs_cuda", "H410"), ("wrong_shapes", "H414")])
def test_a_job_that_cannot_be_traced_says_why(factory, rule):
    """The error of the child is that of the command, with the user's own line."""
    error = refused("--device", "T4", "--precision", "fp32", factory=factory)
    assert error["rule"] == rule
    assert "forecast_factories.py" in json.dumps(error)


def test_a_folder_that_is_missing_is_said_before_anything_is_traced(tmp_path):
    """The system's own error, and exit code 2."""
    result = call("--device", "T4", "--out", tmp_path / "none" / "x")
    assert result.exit_code == 2
    assert f"{tmp_path / 'none'}" in result.output


@pytest.mark.slow
@pytest.mark.usefixtures("prepared_forecasts")
def test_a_step_that_goes_another_way_from_some_size_on_is_traced_beyond_it():
    """Two and four samples differ, so four and eight are taken, and that is said among the
    assumptions.
    """
    options = [
        "--device",
        "L4",
        "--global-batch-size",
        "16",
        "--precision",
        "fp32",
        "--no-verify",
        "--json",
    ]
    result = call(*options, factory="branching")
    assert result.exit_code == 0, result.output
    assert any(
        "from 4 and 8 samples" in one["what"] for one in json.loads(result.stdout)["assumptions"]
    )


@pytest.mark.slow
@pytest.mark.usefixtures("prepared_forecasts")
def test_a_precision_in_which_the_step_does_not_run_is_left_out():
    """The plans in fp32 stay, and why there are none in bf16 is said.

    Asked for alone, the error names it.
    """
    options = ["--device", "L4", "--global-batch-size", "8", "--json"]
    result = call(*options, "--no-verify", factory="fp32_only")
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert {row["precision"] for row in shown["rows"]} == {"fp32"}
    assert any(one["what"].startswith("bf16 was left out") for one in shown["assumptions"])
    alone = call(*options, "--precision", "bf16", factory="fp32_only")
    assert alone.exit_code == 2
    assert "in bf16, under autocast" in alone.stdout
