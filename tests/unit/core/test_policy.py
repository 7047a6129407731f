"""Settings: what is refused, how the sources are layered, and what the errors say."""

from __future__ import annotations

import argparse
import dataclasses
import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.core.errors import PolicyError
from holdfast.core.policy.durations import seconds_of
from holdfast.core.policy.policy import Policy

_NOT_A_COUNT = [0, -1, 1.0, 2.5, math.nan, math.inf, "8", True, False, [4]]
_NOT_HOURS = [0, 0.0, -1, math.nan, math.inf, "24", True]
_SWITCH = ([0, 1, "true", None], [True, False])
_VALUES: dict[str, tuple[list[Any], list[Any]]] = {  # the bad and the good ones
    "micro_batch_size": ([*_NOT_A_COUNT, "Auto"], ["auto", None, 1, 64]),
    "grow_after_steps": ([*_NOT_A_COUNT, None], [1, 10**6]),
    "forecast_micro_batch_size": (_NOT_A_COUNT, [None, 1, 64]),
    "recompute": (
        [0, 1, "true", None, (), ("",), (1,)],
        [True, False, ("encoder.layers.0",), ("a", "b.1")],
    ),
    "check_split": ([*_SWITCH[0], "false"], [True, False]),
    "allow_split_with": (
        ["batch_norm", ("batchnorm",), ("batch_norm", None), None, {"buffers"}, 1],
        [(), ("batch_norm",), ("buffers", "coupled_loss")],
    ),
    "cpu_malloc_threshold_bytes": ([*_NOT_A_COUNT, "Auto"], ["auto", None, 1, 2**30]),
    "max_grad_norm": (
        [0, 0.0, -1.0, math.nan, math.inf, -math.inf, "1.0", True, False, [1.0]],
        [None, 1, 1e-9, 5.0, np.float64(0.5)],
    ),
    # The others need a limit: see the contradictions
    "clip_by": (["groups", "GLOBAL", None, 1], ["global"]),
    "provenance": _SWITCH,
    "drop_nonfinite_samples": _SWITCH,
    "repeat_step_interval": (_NOT_A_COUNT, [None, 1, 1000]),
    "nonfinite_patience": (_NOT_A_COUNT, [None, 1]),
    "max_rollbacks": ([-1, 1.5, math.nan, True, False, None, "2"], [0, 1]),
    "spike_action": (["rollback", "Skip", None, False], ["off", "warn", "skip", "roll_back"]),
    "snapshot_interval_steps": (_NOT_A_COUNT, [None, 1]),
    "decide": (["Late", "never", None, True, 1], ["auto", "now", "late"]),
    "diagnose": _SWITCH,
    "objective": (["gan", "minimise", None, 1], ["minimize", "adversarial", "reinforcement"]),
    "frozen": (["encoder.*", ("",), (1,), None, {"a"}], [(), ("encoder.*", "head.bias")]),
    "ignore_rules": (["H808", ("",), (808,), None, ("h808",), ("H9999999",)], [(), ("H808",)]),
    "precision": (["float32", "bf-16", None, 16], ["fp32", "bf16", "fp16"]),
    "save_interval_steps": ([0, -1, 1.5, True, "often", math.nan], [None, "auto", 1]),
    "async_save": _SWITCH,
    "save_overhead": (
        [0.0, 1.0, 1, 0, -0.01, math.nan, math.inf, "0.01", True, None],
        [0.01, np.float64(0.5)],
    ),
    "save_interval_minutes": (_NOT_HOURS, [None, 1, 0.25, np.float64(3.1)]),
    "mean_time_between_failures_hours": ([*_NOT_HOURS, None], [1, 0.25, np.float64(3.1)]),
    "keep_latest_k": ([*_NOT_A_COUNT, None], [1, 50]),
    "mirror": ([1, True, "", ["s3://b"]], [None, "s3://bucket/run", "/mnt/disk/run"]),
    "scheduler_interval": (["steps", "batch", 1, True], ["step", "epoch", None]),
    "stop_signals": (
        ["SIGTERM", ("USR1",), ("SIGKILL",), (10,), None, {"SIGTERM"}],
        [(), ("SIGTERM", "SIGUSR2")],
    ),
    "max_time": (
        [90, 1.5, True, "", "90", "0s", "-5m", "1.5h", "5m1h", "90 m", "11:30", "1:00:60", "1-02"],
        ["auto", None, "11h30m", "90m", "45s", "1d2h", "11:30:00", "1-02:00:00"],
    ),
    "stop_exit_code": ([-1, 256, 1.5, True, "85"], [None, 0, 85, 255]),
    "notify": (["", " ", 1, True, ("a",)], [None, "notify-send", "https://ntfy.sh/topic"]),
}


@pytest.fixture
def policy_file(tmp_path: Path) -> Path:
    return tmp_path / "policy.yaml"


def test_every_field_refuses_its_bad_values_by_name_and_keeps_the_good_ones() -> None:
    """An error names field, value, where it is from and what is allowed.

    The table of this file has every field.
    """
    assert set(_VALUES) == {field.name for field in dataclasses.fields(Policy)}
    for name, (bad, good) in _VALUES.items():
        for value in bad:
            with pytest.raises(PolicyError) as caught:
                Policy(**{name: value})
            assert (caught.value.rule, caught.value.what) == (
                "H102",
                f"{name}={value!r} (argument)",
            )
            assert caught.value.limit.startswith("it must be ")
        for value in good:
            assert getattr(Policy(**{name: value}), name) == value


def test_every_field_has_an_option_and_its_help_says_the_default() -> None:
    """What a field may be can be said on a command line, in YAML syntax."""
    parser = argparse.ArgumentParser()
    Policy.add_arguments(parser)
    for name, (_, good) in _VALUES.items():
        for value in good:
            text = (
                ",".join(value)
                if isinstance(value, tuple)
                else "none"
                if value is None
                else str(value).lower()
            )
            found = Policy.from_arguments(parser.parse_args(["--" + name.replace("_", "-"), text]))
            assert getattr(found, name) == value
    shown = parser.format_help()
    assert all("--" + name.replace("_", "-") in shown for name in _VALUES)
    assert "(default: 'warn')" in " ".join(shown.split())


def test_a_misspelt_name_is_refused_wherever_it_stands(
    monkeypatch: pytest.MonkeyPatch, policy_file: Path
) -> None:
    """An unknown name is an H101 that proposes the field that was meant, if one is alike."""
    with pytest.raises(PolicyError, match="'max_grad_norm'") as caught:
        Policy(max_gradient_norm=1.0)
    assert caught.value.rule == "H101"
    assert "'max_gradient_norm' (argument)" in str(caught.value)
    with pytest.raises(PolicyError, match=r"help\(holdfast\.Policy\)") as caught:
        Policy(banana=1.0)
    assert len(str(caught.value)) < 300
    policy_file.write_text("# of this run\nkeep_lates_k: 2")
    with pytest.raises(PolicyError, match=r"policy\.yaml, line 2\)(.|\n)*'keep_latest_k'"):
        Policy.from_yaml(policy_file)
    monkeypatch.setenv("HOLDFAST_RECOMPUT", "false")
    with pytest.raises(PolicyError, match=r"HOLDFAST_RECOMPUT\)(.|\n)*'recompute'"):
        Policy()


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("micro_batch_size", "8", 8),
        ("micro_batch_size", "auto", "auto"),
        ("micro_batch_size", "None", None),
        ("micro_batch_size", "null", None),
        ("micro_batch_size", "~", None),
        ("max_grad_norm", "1e-3", 0.001),
        ("max_grad_norm", "5", 5.0),
        ("max_grad_norm", "none", None),
        ("recompute", "false", False),
        ("spike_action", "off", "off"),
        ("frozen", "[encoder.*, 'head']", ("encoder.*", "head")),
        ("check_split", "off", False),
        ("frozen", "", ()),
        ("recompute", "a.0, b", ("a.0", "b")),
    ],
)
def test_text_means_the_same_in_a_file_and_in_a_variable(
    field: str, text: str, value: object, monkeypatch: pytest.MonkeyPatch, policy_file: Path
) -> None:
    """Numbers, exponents without a dot, None and lists read alike from YAML and from the
    environment.
    """
    policy_file.write_text(f"{field}: {text}\n")
    from_file = getattr(Policy.from_yaml(policy_file), field)
    monkeypatch.setenv(f"HOLDFAST_{field.upper()}", text)
    from_variable = getattr(Policy(), field)
    assert from_file == from_variable == value
    assert type(from_file) is type(from_variable) is type(value)


def test_a_bad_variable_is_refused_unless_a_keyword_replaces_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bad value from the environment, also broken YAML, is checked like any other.

    Only the one that counts is.
    """
    monkeypatch.setenv("HOLDFAST_MAX_GRAD_NORM", "[1.0")
    with pytest.raises(
        PolicyError, match=r"max_grad_norm=\[1\.0 \(.* HOLDFAST_MAX_GRAD_NORM\)(.|\n)*H102"
    ):
        Policy()
    monkeypatch.setenv("HOLDFAST_MAX_GRAD_NORM", "0")
    with pytest.raises(
        PolicyError, match=r"max_grad_norm=0 \(environment variable HOLDFAST_MAX_GRAD_NORM\)"
    ):
        Policy()
    assert Policy(max_grad_norm=1.0).max_grad_norm == 1.0
    with pytest.raises(PolicyError, match=r"max_grad_norm=-1 \(argument\);"):
        Policy(max_grad_norm=-1)
    monkeypatch.setenv("HOLDFAST_MAX_GRAD_NORM", "1.0")
    monkeypatch.setenv("HOLDFAST_PRESET", "ttz")
    with pytest.raises(PolicyError, match=r"'ttz'.* HOLDFAST_PRESET"):
        Policy()


@pytest.mark.parametrize(
    "content",
    [
        b"- a\n",
        b"just text",
        b"3",
        b"a: [1",
        b"\xff\xfe\xfa",
        b"key: !!python/object:os.system {}",
        None,
    ],
)
def test_a_file_that_is_no_yaml_mapping_is_refused(
    content: bytes | None, policy_file: Path
) -> None:
    """A list, text, broken YAML, bytes, YAML that would run code and no file at all are H103
    that name the file.
    """
    if content is not None:
        policy_file.write_bytes(content)
    with pytest.raises(PolicyError) as caught:
        Policy.from_yaml(policy_file)
    assert caught.value.rule == "H103"
    assert str(policy_file) in str(caught.value)


def test_an_error_of_a_source_says_what_was_meant(
    monkeypatch: pytest.MonkeyPatch, policy_file: Path
) -> None:
    """A key that comes twice has both lines, a word of a value the nearest one, and a file's
    name its own way.
    """
    for text, said in {
        "diagnose: true\n\ndiagnose: off": (r"line 3: 'diagnose'(.*)line 1(.|\n)*H103"),
        "{preset: tts, preset: asr}": "'preset'(.*)line 1",
        "frozen: {a: b}": "a list of strings",
        "precision: BF16": "Fix: (.*)'bf16'",
        "allow_split_with: [batchnorm]": "Fix: (.*)'batch_norm'",
        "policy: other.yaml": r"Guard\(policy=FILE\)",
    }.items():
        policy_file.write_text(text)
        with pytest.raises(PolicyError, match=said):
            Policy.from_yaml(policy_file)
    monkeypatch.setenv("HOLDFAST_MAX_GRAD_NORM", "")  # as one that is not set
    assert Policy.preset("tts").max_grad_norm == 1.0


@pytest.mark.parametrize(
    ("duration", "seconds"),
    [
        ("11h30m", 41400),
        ("90m", 5400),
        ("45s", 45),
        ("1d2h", 93600),
        ("11:30:00", 41400),
        ("1-02:00:03", 93603),
        (timedelta(hours=1, milliseconds=500), 3600.5),
    ],
)
def test_a_duration_is_read_in_seconds(duration: str | timedelta, seconds: float) -> None:
    """Units, and the forms of Slurm that say hours, minutes and seconds, are read alike."""
    assert Policy(max_time=duration).max_time == duration
    assert seconds_of(duration) == seconds


def test_replace_checks_and_leaves_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    """``replace`` changes what it is given only, validates it, and does not read the environment
    again.
    """
    policy = Policy(keep_latest_k=7)
    monkeypatch.setenv("HOLDFAST_KEEP_LATEST_K", "9")
    changed = policy.replace(max_rollbacks=0)
    assert (changed.keep_latest_k, changed.max_rollbacks, policy.max_rollbacks) == (7, 0, 2)
    with pytest.raises(PolicyError):
        policy.replace(max_rollbacks=-1)
    with pytest.raises(PolicyError):
        policy.replace(max_rollback=1)


def test_of_takes_what_a_caller_may_pass(policy_file: Path) -> None:
    """None, a path, text and a policy all become a policy, with the overrides applied."""
    policy_file.write_text("# nothing yet\n")
    assert Policy.from_yaml(policy_file) == Policy()
    policy_file.write_text("keep_latest_k: 5")
    policy = Policy(keep_latest_k=6)
    assert Policy.of(None, max_rollbacks=0) == Policy(max_rollbacks=0)
    assert Policy.of(policy_file).keep_latest_k == Policy.of(str(policy_file)).keep_latest_k == 5
    assert Policy.of(policy) is policy
    assert Policy.of({"keep_latest_k": 5}, max_rollbacks=0) == Policy(
        keep_latest_k=5, max_rollbacks=0
    )
    assert Policy.of(policy, max_rollbacks=0) == Policy(keep_latest_k=6, max_rollbacks=0)


def test_a_list_in_a_variable_needs_no_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commas separate, and a pattern may begin with a star, which YAML would take for an alias."""
    monkeypatch.setenv("HOLDFAST_ALLOW_SPLIT_WITH", "batch_norm, buffers,")
    monkeypatch.setenv("HOLDFAST_FROZEN", "*.bias, encoder.*")
    assert (
        Policy().allow_split_with == Policy.of(None).allow_split_with == ("batch_norm", "buffers")
    )
    assert Policy().frozen == ("*.bias", "encoder.*")


_CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"clip_by": "group"}, "clip_by='group' with max_grad_norm=None"),
    (
        {"clip_by": "optimizer", "max_grad_norm": None},
        "clip_by='optimizer' with max_grad_norm=None",
    ),
    (
        {"drop_nonfinite_samples": True, "provenance": False},
        "drop_nonfinite_samples=True with provenance=False",
    ),
    (
        {"allow_split_with": ("buffers",), "micro_batch_size": None},
        "allow_split_with=('buffers',) with micro_batch_size=None",
    ),
]
_AGREEMENTS: list[dict[str, Any]] = [
    {"clip_by": "group", "max_grad_norm": 1.0},
    {"clip_by": "optimizer", "max_grad_norm": 1.0},
    {"drop_nonfinite_samples": True, "provenance": True},
    {"allow_split_with": ("buffers",), "micro_batch_size": 4},
]


def test_fields_that_exclude_each_other_are_refused() -> None:
    """The error names both fields with their values; what its fix asks for is no contradiction."""
    for values, what in _CONTRADICTIONS:
        with pytest.raises(PolicyError) as caught:
            Policy(**values)
        assert (caught.value.rule, caught.value.what) == ("H109", f"{what} (argument)")
    for values in _AGREEMENTS:
        assert {name: getattr(Policy(**values), name) for name in values} == values


def test_contradictions_are_judged_on_the_merged_values(
    monkeypatch: pytest.MonkeyPatch, policy_file: Path
) -> None:
    """Two sources that complete each other are fine, and two that exclude each other are not."""
    policy_file.write_text("\nclip_by: group\n")
    with pytest.raises(PolicyError, match=r"policy\.yaml, line 2\)(.|\n)*H109"):
        Policy.from_yaml(policy_file)
    with pytest.raises(PolicyError, match=r"policy\.yaml, line 2 and argument\)(.|\n)*H109"):
        Policy.from_yaml(policy_file, max_grad_norm=None)
    assert Policy.from_yaml(policy_file, max_grad_norm=1.0).clip_by == "group"
    monkeypatch.setenv("HOLDFAST_MAX_GRAD_NORM", "2.0")
    policy = Policy.from_yaml(policy_file)
    assert (policy.clip_by, policy.max_grad_norm) == ("group", 2.0)
    with pytest.raises(PolicyError, match="H109"):
        policy.replace(max_grad_norm=None)
    assert policy.replace(max_grad_norm=None, clip_by="global").max_grad_norm is None


def _from_command_line(*arguments: str) -> Policy:
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision-of-clock", default="high")  # of the program itself
    Policy.add_arguments(parser)
    return Policy.from_arguments(parser.parse_args(arguments))


@pytest.mark.parametrize(
    ("arguments", "rule", "shown"),
    [
        (("--max-grad-norm", "-1"), "H102", "max_grad_norm=-1 (option --max-grad-norm)"),
        (("--max-grad-norm", "[1"), "H102", "max_grad_norm=[1 (option --max-grad-norm)"),
        (("--preset", "ttts"), "H110", "'ttts' (option --preset)"),
        (("--clip-by", "group"), "H109", "max_grad_norm=None (option --clip-by)"),
        (("--policy", "absent.yaml"), "H103", "absent.yaml"),
    ],
)
def test_a_bad_option_is_an_error_of_the_policy(
    arguments: tuple[str, ...], rule: str, shown: str
) -> None:
    """Options are checked like any other source, and the error says what was given."""
    with pytest.raises(PolicyError) as caught:
        _from_command_line(*arguments)
    assert caught.value.rule == rule
    assert shown in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x]\nb: &b [*a, *a]\n",
        "max_grad_norm: " + "[" * 30_000,
        "- " * 30_000,
        "max_grad_norm: 2001-99-99",
        "max_grad_norm: " + "9" * 5000,
        "max_grad_norm: !!bool x",
        "max_grad_norm: !!int ''",
        "? [a]\n: 1",
        "\0",
        "max_grad_norm: !!python/object/apply:os.system ['true']",
        "max_grad_norm: 1\n" * 5000,
    ],
    ids=[
        "alias",
        "deep",
        "deep by dashes",
        "date",
        "figures",
        "bool",
        "int",
        "key",
        "nul",
        "python",
        "long",
    ],
)
def test_hostile_yaml_is_refused(tmp_path, monkeypatch, text):
    """In a file H103, or H102 of a lone text's line, in a variable H102.

    Never gigabytes, a bare error, an object.
    """
    path, lone = tmp_path / "policy.yaml", text.endswith(("99-99", "9999"))
    path.write_text(text)
    with pytest.raises(PolicyError, match=r"policy\.yaml, line 1\)(.|\n)*H102" if lone else "H103"):
        Policy.from_yaml(path)
    if "\0" not in text:
        monkeypatch.setenv("HOLDFAST_MAX_GRAD_NORM", text.removeprefix("max_grad_norm: "))
        with pytest.raises(PolicyError, match="H102"):
            Policy.of(None)


def test_a_receiver_of_messages_is_kept_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, policy_file: Path
) -> None:
    """Whatever the source: its value is used, and no text that shows the policy contains it."""
    url = "https://me:S3cret@host/S3cret"
    command = 'send -k S3cret "my title"'
    policy_file.write_text(f"notify: '{command}'")
    from_file = Policy.from_yaml(policy_file)
    monkeypatch.setenv("HOLDFAST_NOTIFY", command)
    policies = [Policy(), from_file, Policy(notify=url), Policy().replace(keep_latest_k=1)]

    values = ["".join(policy.notify or "") for policy in policies]
    assert values == [command, command, url, command]
    for policy in policies:
        shown = f"{policy} {policy.notify} {policy.notify!r} {policy.notify!s}"
        assert "S3cret" not in shown
