"""Settings: what is refused, how the sources are layered, and what the errors say."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from pathlib import Path

import numpy as np
import pytest

from holdfast.core.errors import PolicyError
from holdfast.core.policy import Policy

_NOT_A_COUNT = [0, -1, 1.0, 2.5, math.nan, math.inf, "8", True, False, [4]]
_BAD = {
    "micro_batch_size": [*_NOT_A_COUNT, "Auto"],
    "grow_after_steps": [*_NOT_A_COUNT, None],
    "recompute": [0, 1, "true", None],
    "check_split": [0, 1, "false", None],
    "allow_split_with": ["batch_norm", ("batchnorm",), ("batch_norm", None), None, {"buffers"}, 1],
    "cpu_malloc_threshold_bytes": _NOT_A_COUNT,
    "max_grad_norm": [0, 0.0, -1.0, math.nan, math.inf, -math.inf, "1.0", True, False, [1.0]],
    "clip_by": ["groups", "GLOBAL", None, 1],
    "nonfinite_patience": _NOT_A_COUNT,
    "max_rollbacks": [-1, 1.5, math.nan, True, False, None, "2"],
    "precision": ["float32", "bf-16", None, 16],
    "save_interval_steps": _NOT_A_COUNT,
    "keep_latest_k": [*_NOT_A_COUNT, None],
    "scheduler_interval": ["steps", "batch", 1, True],
}
_GOOD = {
    "micro_batch_size": ["auto", None, 1, 64],
    "grow_after_steps": [1, 10**6],
    "recompute": [True, False],
    "check_split": [True, False],
    "allow_split_with": [(), ("batch_norm",), ("buffers", "coupled_loss")],
    "cpu_malloc_threshold_bytes": [None, 1, 2**30],
    "max_grad_norm": [None, 1, 1e-9, 5.0, np.float64(0.5)],
    "clip_by": ["global", "optimizer", "group"],
    "nonfinite_patience": [None, 1],
    "max_rollbacks": [0, 1],
    "precision": ["fp32", "bf16", "fp16"],
    "save_interval_steps": [None, 1],
    "keep_latest_k": [1, 50],
    "scheduler_interval": ["step", "epoch", None],
}


def _pairs(table: dict[str, list[object]]) -> list[tuple[str, object]]:
    return [(name, value) for name, values in table.items() for value in values]


@pytest.fixture
def policy_file(tmp_path: Path) -> Path:
    return tmp_path / "policy.yaml"


def test_the_tables_of_this_file_cover_every_field() -> None:
    """No field is left without a bad and a good value below."""
    fields = {field.name for field in dataclasses.fields(Policy)}
    assert set(_BAD) == set(_GOOD) == fields


@pytest.mark.parametrize(("name", "value"), _pairs(_BAD))
def test_a_bad_value_is_refused_by_name(name: str, value: object) -> None:
    """Every field refuses its bad values, and the error names field, value and what is allowed."""
    with pytest.raises(PolicyError) as caught:
        Policy(**{name: value})
    shown = tuple(value) if isinstance(value, list) else value
    assert caught.value.rule == "H102"
    assert caught.value.what == f"{name}={shown!r}"
    assert caught.value.limit.startswith("it must be ")
    assert caught.value.fix


@pytest.mark.parametrize(("name", "value"), _pairs(_GOOD))
def test_a_good_value_is_kept(name: str, value: object) -> None:
    """Every field keeps the values that its documentation allows."""
    assert getattr(Policy(**{name: value}), name) == value


def test_a_misspelt_keyword_names_the_nearest_field() -> None:
    """An unknown keyword is an error that proposes the field that was meant."""
    with pytest.raises(PolicyError, match="did you mean 'max_grad_norm'") as caught:
        Policy(max_gradient_norm=1.0)
    assert caught.value.rule == "H101"
    assert "'max_gradient_norm' is not a policy field" in str(caught.value)


def test_a_misspelt_variable_and_a_misspelt_key_are_refused(
    monkeypatch: pytest.MonkeyPatch, policy_file: Path
) -> None:
    """A typing error in the environment or in a file is as loud as one in a keyword."""
    policy_file.write_text("keep_lates_k: 2")
    with pytest.raises(PolicyError, match="did you mean 'keep_latest_k'"):
        Policy.from_yaml(policy_file)
    monkeypatch.setenv("HOLDFAST_RECOMPUT", "false")
    with pytest.raises(PolicyError, match="did you mean 'recompute'"):
        Policy()


def test_variables_win_over_the_file_and_keywords_over_variables(
    monkeypatch: pytest.MonkeyPatch, policy_file: Path
) -> None:
    """The layers are default < YAML < environment < keyword, field by field."""
    policy_file.write_text("keep_latest_k: 11\nmax_rollbacks: 12\ngrow_after_steps: 13\n")
    monkeypatch.setenv("HOLDFAST_MAX_ROLLBACKS", "22")
    monkeypatch.setenv("HOLDFAST_GROW_AFTER_STEPS", "23")
    policy = Policy.from_yaml(policy_file, grow_after_steps=33)
    assert (policy.keep_latest_k, policy.max_rollbacks, policy.grow_after_steps) == (11, 22, 33)
    assert policy.nonfinite_patience == Policy().nonfinite_patience
    assert Policy(max_rollbacks=1).max_rollbacks == 1


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("micro_batch_size", "8", 8),
        ("micro_batch_size", "auto", "auto"),
        ("micro_batch_size", "None", None),
        ("micro_batch_size", "null", None),
        ("micro_batch_size", "~", None),
        ("max_grad_norm", "1e-3", 0.001),
        ("max_grad_norm", "5", 5),
        ("recompute", "false", False),
        ("scheduler_interval", "None", None),
        ("precision", "bf16", "bf16"),
    ],
)
def test_text_means_the_same_in_a_file_and_in_a_variable(
    field: str, text: str, value: object, monkeypatch: pytest.MonkeyPatch, policy_file: Path
) -> None:
    """Numbers, exponents without a dot, None and lists read alike from YAML and from the environment."""
    policy_file.write_text(f"{field}: {text}\n")
    from_file = getattr(Policy.from_yaml(policy_file), field)
    monkeypatch.setenv(f"HOLDFAST_{field.upper()}", text)
    from_variable = getattr(Policy(), field)
    assert from_file == from_variable == value
    assert type(from_file) is type(from_variable) is type(value)


def test_a_list_in_a_file_becomes_a_tuple(policy_file: Path) -> None:
    """A YAML list of hazards is accepted, and the frozen policy holds a tuple."""
    policy_file.write_text("allow_split_with: [batch_norm, buffers]\n")
    assert Policy.from_yaml(policy_file).allow_split_with == ("batch_norm", "buffers")


def test_a_bad_variable_is_refused_unless_a_keyword_replaces_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad value from the environment is checked like any other, and only the value that counts is."""
    monkeypatch.setenv("HOLDFAST_MAX_GRAD_NORM", "0")
    with pytest.raises(PolicyError, match="max_grad_norm=0"):
        Policy()
    assert Policy(max_grad_norm=1.0).max_grad_norm == 1.0


def test_a_variable_that_is_no_yaml_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken YAML in a variable is an H102 with the name of the variable."""
    monkeypatch.setenv("HOLDFAST_MAX_GRAD_NORM", "[1.0")
    with pytest.raises(PolicyError, match=r"HOLDFAST_MAX_GRAD_NORM='\[1\.0'") as caught:
        Policy()
    assert caught.value.rule == "H102"


def test_other_variables_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only variables that begin with HOLDFAST_ are read."""
    monkeypatch.setenv("MAX_GRAD_NORM", "7")
    monkeypatch.setenv("NOTHOLDFAST_MAX_GRAD_NORM", "7")
    assert Policy().max_grad_norm is None


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text", "3", "true"])
def test_a_file_that_is_no_mapping_is_refused(text: str, policy_file: Path) -> None:
    """A YAML list, text or number is an H103 that names the file."""
    policy_file.write_text(text)
    with pytest.raises(PolicyError, match="mapping of field names") as caught:
        Policy.from_yaml(policy_file)
    assert caught.value.rule == "H103"
    assert str(policy_file) in str(caught.value)


@pytest.mark.parametrize("content", [b"a: [1", b"\xff\xfe\xfa", b"key: !!python/object:os.system {}"])
def test_a_file_that_cannot_be_parsed_is_refused(content: bytes, policy_file: Path) -> None:
    """Broken YAML, bytes that are no text, and YAML that would run code are H103."""
    policy_file.write_bytes(content)
    with pytest.raises(PolicyError) as caught:
        Policy.from_yaml(policy_file)
    assert caught.value.rule == "H103"


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    """A path without a file is an H103, not a policy of defaults."""
    for path in (tmp_path / "absent.yaml", tmp_path):
        with pytest.raises(PolicyError, match="cannot be read") as caught:
            Policy.from_yaml(path)
        assert caught.value.rule == "H103"


def test_an_empty_file_gives_the_defaults(policy_file: Path) -> None:
    """A file with nothing but a comment sets nothing."""
    policy_file.write_text("# nothing yet\n")
    assert Policy.from_yaml(policy_file) == Policy()


def test_a_policy_is_frozen() -> None:
    """No field can be set after construction, and no new one invented."""
    policy = Policy()
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.keep_latest_k = 1  # type: ignore[misc]
    with pytest.raises((dataclasses.FrozenInstanceError, AttributeError, TypeError)):
        policy.keep_latest = 1  # type: ignore[attr-defined]


def test_replace_checks_and_leaves_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    """``replace`` changes what it is given only, validates it, and does not read the environment again."""
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
    policy_file.write_text("keep_latest_k: 5")
    policy = Policy(keep_latest_k=6)
    assert Policy.of(None, max_rollbacks=0) == Policy(max_rollbacks=0)
    assert Policy.of(policy_file).keep_latest_k == Policy.of(str(policy_file)).keep_latest_k == 5
    assert Policy.of(policy) is policy
    assert Policy.of(policy, max_rollbacks=0) == Policy(keep_latest_k=6, max_rollbacks=0)


def test_a_policy_can_be_copied_pickled_and_hashed() -> None:
    """Copies of a policy are equal to it, so it can travel to another process."""
    policy = Policy(max_grad_norm=2.0, allow_split_with=["buffers"])
    for twin in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy)), dataclasses.replace(policy)):
        assert twin == policy
        assert hash(twin) == hash(policy)


def test_hazards_can_be_allowed_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list in a variable, separated by commas, is the tuple that the field needs, with Policy() and with a file."""
    monkeypatch.setenv("HOLDFAST_ALLOW_SPLIT_WITH", "batch_norm, buffers,")
    assert Policy().allow_split_with == ("batch_norm", "buffers")
    assert Policy.of(None).allow_split_with == ("batch_norm", "buffers")
