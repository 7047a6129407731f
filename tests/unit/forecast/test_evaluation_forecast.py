"""The forecast of an evaluation: its memory on top of the training state, and which peak counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit.forecast.forecast_factories import EVALUATED_SAMPLES, EVALUATED_WIDTH
from typer.testing import CliRunner

from holdfast.cli.main import make_app
from holdfast.core.errors import PolicyError
from holdfast.forecast.job.tracing import TraceRequest, trace_job
from holdfast.forecast.trace.events import live_peak, owners_at_peak

pytestmark = pytest.mark.slow
FACTORIES = Path(__file__).with_name("forecast_factories.py")
# One tensor of the evaluated width for all samples, in fp32.
LAYER_BYTES = EVALUATED_SAMPLES * EVALUATED_WIDTH * 4


def trace(factory, **settings):
    request = TraceRequest(
        factory=f"{FACTORIES}:{factory}", sizes=(2,), traces_evaluation=True, **settings
    )
    return trace_job(request)


def test_an_evaluation_keeps_no_activations():
    """It holds the batch and the input and output of one layer, beside the training state."""
    result = trace("evaluated")
    evaluation = result.evaluation

    # Weights, gradients and the two moments of AdamW.
    training_state_bytes = 4 * 4 * result.parameters
    beside_training_state = live_peak(evaluation) - training_state_bytes
    assert evaluation.micro_batch_size == EVALUATED_SAMPLES
    assert 3 * LAYER_BYTES <= beside_training_state < 3.2 * LAYER_BYTES


def test_without_a_batch_of_its_own_it_has_the_size_of_the_training_step():
    """The batch of the training step is evaluated."""
    assert trace("evaluated_alike").evaluation.micro_batch_size == 2


def test_it_is_traced_only_if_there_is_one_and_it_is_asked_for():
    """Other traces cost nothing more."""
    assert trace("mlp").evaluation is None
    without = TraceRequest(factory=f"{FACTORIES}:evaluated", sizes=(2,))
    assert trace_job(without).evaluation is None


@pytest.mark.parametrize(
    ("factory", "rule", "word"),
    [
        ("fails_in_evaluation", "H414", "evaluation"),
        ("evaluates_nothing", "H412", "evaluate"),
        ("misspells_evaluation", "H412", "eval_batch"),
        ("has_only_evaluation_batch", "H412", "evaluate"),
    ],
)
def test_an_evaluation_that_cannot_be_traced_is_named(factory, rule, word):
    """The error says that it is about the evaluation."""
    with pytest.raises(PolicyError) as refusal:
        trace(factory)
    assert refusal.value.rule == rule
    assert word in refusal.value.what


@pytest.mark.parametrize(
    ("margin", "fits"),
    # A device of 1 GiB has 297 MiB beside the context. The allocator reserves 28 MiB for the
    # training step and 48 MiB for the evaluation.
    [("0MiB", True), ("259MiB", False)],
)
def test_an_evaluation_that_does_not_fit_is_exit_code_1(margin, fits):
    """The plan itself fits in both cases."""
    arguments = ["--device", "1GiB", "--precision", "fp32", "--global-batch-size", "8"]
    result = CliRunner().invoke(
        make_app("plan"),
        ["plan", f"{FACTORIES}:evaluated", *arguments, "--margin", margin, "--json"],
    )
    assert result.exit_code == (0 if fits else 1), result.output
    (device,) = json.loads(result.stdout)["devices"]
    assert device["recommended"] is not None
    evaluation = device["verified"]["evaluation"]
    assert evaluation["samples"] == EVALUATED_SAMPLES
    assert evaluation["fits"] is fits


def test_a_job_without_an_optimizer_is_an_evaluation():
    """It holds the weights, the batch, and the input and output of one layer, and no gradients."""
    samples = 1024
    request = TraceRequest(factory=f"{FACTORIES}:only_evaluated", sizes=(samples,))
    result = trace_job(request)
    (step,) = result.traces

    assert result.only_evaluates
    owners = owners_at_peak(step)
    assert owners["parameters"] == 4 * result.parameters
    assert not {"gradients", "optimizer state"} & owners.keys()
    layer_bytes = samples * EVALUATED_WIDTH * 4
    beside_weights = live_peak(step) - owners["parameters"]
    assert 3 * layer_bytes <= beside_weights < 3.2 * layer_bytes
    assert step.blocks == ()


def test_the_plan_of_an_evaluation_recommends_no_policy():
    """Its largest batch is found and verified."""
    arguments = ["--device", "1GiB", "--precision", "fp32", "--margin", "100MiB"]
    result = CliRunner().invoke(
        make_app("plan"), ["plan", f"{FACTORIES}:only_evaluated", *arguments]
    )
    assert result.exit_code == 0, result.output
    assert "Policy(" not in result.output
    assert "traced again" in result.output


def test_options_of_a_training_step_are_refused_for_an_evaluation():
    """There is nothing to divide."""
    arguments = ["--device", "1GiB", "--precision", "fp32", "--global-batch-size", "8", "--json"]
    result = CliRunner().invoke(
        make_app("plan"), ["plan", f"{FACTORIES}:only_evaluated", *arguments]
    )
    assert result.exit_code == 2, result.output
    assert json.loads(result.stdout)["error"]["rule"] == "H421"
