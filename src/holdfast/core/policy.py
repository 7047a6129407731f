"""The settings of a run: frozen, validated, each with its meaning, default and the source of the default.

Where a value comes from, weakest first: the default here, a YAML file, a ``HOLDFAST_*`` variable, a keyword
argument.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, dataclass_transform, get_args

from holdfast.core.errors import PolicyError

PREFIX = "HOLDFAST_"
SplitHazard = Literal["batch_norm", "buffers", "coupled_loss"]
ClipBy = Literal["global", "optimizer", "group"]
Precision = Literal["fp32", "bf16", "fp16"]
SpikeAction = Literal["off", "warn", "skip", "roll_back"]
Objective = Literal["minimize", "adversarial", "reinforcement"]
SchedulerInterval = Literal["step", "epoch"]

_Class = TypeVar("_Class")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def _layered(cls: type[_Class]) -> type[_Class]:
    """Let the environment fill the fields that the caller did not give, and name the nearest key in errors."""
    made = dataclass(frozen=True, slots=True, kw_only=True)(cls)
    plain_init: Callable[..., None] = made.__init__

    @functools.wraps(plain_init)
    def __init__(self: Any, **values: Any) -> None:  # noqa: N807
        check_keys(values)
        merged = {**_from_environment(os.environ), **values}
        plain_init(self, **{key: _tuple_if_list(value) for key, value in merged.items()})

    made.__init__ = __init__  # type: ignore[method-assign]
    return made


@_layered
class Policy:
    """How a run is kept alive. Every field can be given by name, in YAML, or as ``HOLDFAST_<FIELD>``."""

    micro_batch_size: int | Literal["auto"] | None = "auto"
    """Most samples in one forward/backward. ``"auto"``: the whole batch, less only after out-of-memory, and
    more again later. A number: never more than this. None: never split."""

    grow_after_steps: int = 100
    """Clean steps before a larger micro-batch is tried again; doubled after each trial that fails.
    A failed trial costs at most two attempts, so trying once in 100 steps costs at most 2 %."""

    recompute: bool = True
    """Whether activation checkpointing of repeated blocks may be switched on when memory is short."""

    check_split: bool = True
    """Whether to test, once per loss function and on at most 4 samples, that splitting a batch leaves its
    gradient unchanged. Losses with in-batch negatives fail this test and are then never split."""

    allow_split_with: tuple[SplitHazard, ...] = ()
    """Hazards that you accept by name, although splitting then changes training: ``"batch_norm"`` (statistics
    of each micro-batch), ``"buffers"`` (updated once per micro-batch), ``"coupled_loss"`` (terms across
    samples)."""

    cpu_malloc_threshold_bytes: int | None = 4 * 2**20
    """Size in bytes from which glibc gives freed memory back to the system, which makes out-of-memory on the
    CPU recoverable. None leaves malloc alone, which is faster for models whose activations are that large, since
    their pages are not zeroed anew in each step (``benchmarks/malloc_threshold`` measures by how much). 4 MiB: 84
    of 84 recoveries, where the default recovered 11 of 84 (measured on glibc 2.36)."""

    max_grad_norm: float | None = None
    """Largest gradient norm; larger gradients are scaled down to it. None turns clipping off."""

    clip_by: ClipBy = "global"
    """Over what the norm is taken: all gradients of the step (keeps the direction), each ``"optimizer"``, or
    each parameter ``"group"`` of each optimizer. They are different algorithms."""

    adaptive_clip_factor: float | None = None
    """Largest norm of a unit's gradient as a fraction of the norm of the unit's weights (AGC, arXiv 2102.06171, which
    uses 0.01 at batch size 4096). It has no running statistics that a NaN could spoil. Applied before
    ``max_grad_norm``. None turns it off."""

    provenance: bool = True
    """Whether a step with NaN or Inf is replayed to name the operation, module, parameter and sample that it came
    from. Costs nothing until it happens."""

    drop_nonfinite_samples: bool = False
    """Whether a step with NaN or Inf is made again without the samples that it came from, where they are found;
    False skips the whole step."""

    nonfinite_patience: int | None = 3
    """Steps in a row that may be skipped for NaN or Inf before the run returns to its last good checkpoint.
    None: skip for ever. 3: SpeechBrain's default."""

    max_rollbacks: int = 2
    """Returns to a checkpoint in a row before the run stops. A row ends ``nonfinite_patience`` steps beyond the
    step that the last return came from."""

    spike_action: SpikeAction = "roll_back"
    """The strongest answer to a loss and gradient norm that stand far out: ``"off"``; ``"warn"``; ``"skip"`` such
    steps; ``"roll_back"`` to the last good state when they persist, and pass over the batches that led there."""

    spike_clip: bool = False
    """Whether a gradient whose norm stands out, though not far, is scaled down to the usual norm. This acts on
    healthy runs too, which is why it has to be asked for."""

    snapshot_interval_steps: int | None = 100
    """Optimizer steps between copies of the state in host memory, to which a rollback returns; none are kept where
    they do not fit, and None keeps none: a rollback then returns to a checkpoint. 100: PaLM's restart distance."""

    rollback_lr_factor: float | None = None
    """What the learning rates are multiplied by after a rollback, above 0 and below 1. None leaves them alone."""

    diagnose: bool = True
    """Whether to look for the reasons why a model does not learn: exact contracts in the first steps, samples
    later."""

    objective: Objective = "minimize"
    """What the loss means. In ``"adversarial"`` and ``"reinforcement"`` training its level says nothing, so spikes
    are only warned of and rules about a falling loss are silent."""

    frozen: tuple[str, ...] = ()
    """Parameters that are meant not to learn, as shell patterns of their names such as ``"encoder.*"``."""

    ignore_rules: tuple[str, ...] = ()
    """Rules of the diagnosis that shall be silent, such as ``"H808"``."""

    precision: Precision = "fp32"
    """Autocast type of the forward pass. ``"fp16"`` brings a loss scaler that holdfast owns."""

    save_interval_steps: int | None = 500
    """Optimizer steps between checkpoints. None writes none, so there is nothing to roll back to; a run directory
    that holds checkpoints already is resumed all the same. 500: the Hugging Face Trainer's default."""

    keep_latest_k: int = 3
    """Good checkpoints to keep, the newest; at least 1."""

    scheduler_interval: SchedulerInterval | None = "step"
    """When the learning-rate scheduler is advanced: after each optimizer ``"step"`` that moved the weights,
    after each ``"epoch"``, or never (None: you call it)."""

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            PolicyError: H102, naming the field, its value and what is allowed.
        """
        for name, check in _CHECKS.items():
            value = getattr(self, name)
            expected = check(value)
            if expected is not None:
                raise _bad_value(name, value, expected)
        for what, fix in _contradictions(self):
            raise PolicyError(what, limit="one of the two would have no effect", fix=fix, rule="H109")

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str], **overrides: Any) -> Policy:
        """Read a policy from a YAML mapping; ``HOLDFAST_*`` variables and then ``overrides`` win over it.

        Raises:
            PolicyError: H101 for an unknown key, H102 for a value, H103 for a file that is no YAML mapping.

        Example:
            >>> import tempfile, pathlib
            >>> file = pathlib.Path(tempfile.mkdtemp(), "policy.yaml")
            >>> _ = file.write_text("max_grad_norm: 5.0")
            >>> Policy.from_yaml(file, keep_latest_k=2).max_grad_norm
            5.0
        """
        from_file = _read_yaml(Path(path))
        check_keys(from_file)
        return cls(**{**from_file, **_from_environment(os.environ), **overrides})

    @classmethod
    def of(cls, policy: Policy | str | os.PathLike[str] | None, **overrides: Any) -> Policy:
        """Return a policy from what a caller may pass: one, the path of a YAML file, or None for the defaults.

        Raises:
            PolicyError: H101, H102 or H103.
        """
        if isinstance(policy, Policy):
            return policy.replace(**overrides) if overrides else policy
        return cls(**overrides) if policy is None else cls.from_yaml(policy, **overrides)

    def replace(self, **overrides: Any) -> Policy:
        """Return a policy with some fields changed.

        Raises:
            PolicyError: H101 or H102.
        """
        return Policy(**{**dataclasses.asdict(self), **overrides})


def check_keys(values: Iterable[str]) -> None:
    """Check that every key is a policy field.

    Raises:
        PolicyError: H101, naming the nearest field.
    """
    known = [field.name for field in dataclasses.fields(Policy)]
    for key in values:
        if key not in known:
            nearest = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)[0]
            raise PolicyError(
                f"{key!r} is not a policy field",
                limit=f"the fields are {', '.join(known)}",
                fix=f"did you mean {nearest!r}?",
                rule="H101",
            )


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise PolicyError(
            f"policy file {path} cannot be read ({error})",
            limit="a readable YAML file is needed",
            fix="check the path and the YAML syntax.",
            rule="H103",
        ) from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise PolicyError(
            f"policy file {path} holds a {type(loaded).__name__}",
            limit="a mapping of field names to values is needed",
            fix="write one `field: value` per line, for instance `max_grad_norm: 1.0`.",
            rule="H103",
        )
    return {str(key): _plain(value) for key, value in loaded.items()}


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX):
            continue
        import yaml  # here, so that a process without such variables never loads it

        key = variable.removeprefix(PREFIX).lower()
        check_keys([key])
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise _bad_value(variable, text, "a YAML value such as 1.0, true, null or auto") from error
        if isinstance(value, str) and key in ("allow_split_with", "frozen", "ignore_rules"):
            value = [part.strip() for part in value.split(",") if part.strip()]
        found[key] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    if value == "None":
        return None
    if isinstance(value, str):
        # YAML 1.1 reads 1e-3 as text: it wants a dot and a sign.
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _tuple_if_list(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _bad_value(name: str, value: object, expected: str) -> PolicyError:
    return PolicyError(f"{name}={value!r}", limit=f"it must be {expected}", fix=f"pass {expected}.", rule="H102")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check_micro_batch_size(value: object) -> str | None:
    fine = value is None or value == "auto" or _is_count(value)
    return None if fine else 'a whole number >= 1, "auto", or None to turn splitting off'


def _check_norm(value: object) -> str | None:
    # Zero would freeze training and a negative limit would climb the gradient (pytorch#31367).
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf):
        return None
    return "a finite number > 0, or None to turn clipping off"


def _check_count(value: object) -> str | None:
    return None if _is_count(value) else "a whole number >= 1"


def _check_count_or_none(value: object) -> str | None:
    return None if value is None or _is_count(value) else "a whole number >= 1, or None to turn it off"


def _check_flag(value: object) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def _check_rollbacks(value: object) -> str | None:
    return None if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else "a whole number >= 0"


def _check_fraction(value: object) -> str | None:
    if value is None or (isinstance(value, float) and 0 < value < 1):
        return None
    return "a number above 0 and below 1, or None to turn it off"


def _check_texts(value: object) -> str | None:
    fine = isinstance(value, tuple) and all(isinstance(item, str) and item for item in value)
    return None if fine else "a tuple of texts"


def _contradictions(policy: Policy) -> Iterator[tuple[str, str]]:
    """Yield what a policy asks for with one field and rules out with another, and the fix."""
    if policy.clip_by != "global" and policy.max_grad_norm is None:
        yield f"clip_by={policy.clip_by!r} without max_grad_norm", "pass max_grad_norm, for instance 1.0."
    if policy.spike_clip and policy.spike_action == "off":
        yield "spike_clip=True with spike_action='off'", "use spike_action='warn' to clip spikes only."
    if policy.drop_nonfinite_samples and not policy.provenance:
        yield "drop_nonfinite_samples=True with provenance=False", "leave provenance on: it finds the samples."
    if policy.allow_split_with and policy.micro_batch_size is None:
        yield "allow_split_with with micro_batch_size=None", "use micro_batch_size='auto'."
    never = policy.spike_action != "roll_back" and (policy.nonfinite_patience is None or policy.max_rollbacks == 0)
    if policy.rollback_lr_factor is not None and never:
        yield "rollback_lr_factor in a run that never rolls back", "use spike_action='roll_back'."


def _check_hazards(value: object) -> str | None:
    allowed = get_args(SplitHazard)
    fine = isinstance(value, tuple) and all(item in allowed for item in value)
    return None if fine else f"a tuple of some of {', '.join(map(repr, allowed))}"


def _check_choice(*allowed: object) -> Callable[[object], str | None]:
    def check(value: object) -> str | None:
        return None if value in allowed else "one of " + ", ".join(map(repr, allowed))

    return check


_CHECKS: dict[str, Callable[[object], str | None]] = {
    "micro_batch_size": _check_micro_batch_size,
    "grow_after_steps": _check_count,
    "recompute": _check_flag,
    "check_split": _check_flag,
    "allow_split_with": _check_hazards,
    "cpu_malloc_threshold_bytes": _check_count_or_none,
    "max_grad_norm": _check_norm,
    "clip_by": _check_choice(*get_args(ClipBy)),
    "adaptive_clip_factor": _check_norm,
    "provenance": _check_flag,
    "drop_nonfinite_samples": _check_flag,
    "nonfinite_patience": _check_count_or_none,
    "max_rollbacks": _check_rollbacks,
    "spike_action": _check_choice(*get_args(SpikeAction)),
    "spike_clip": _check_flag,
    "snapshot_interval_steps": _check_count_or_none,
    "rollback_lr_factor": _check_fraction,
    "diagnose": _check_flag,
    "objective": _check_choice(*get_args(Objective)),
    "frozen": _check_texts,
    "ignore_rules": _check_texts,
    "precision": _check_choice(*get_args(Precision)),
    "save_interval_steps": _check_count_or_none,
    "keep_latest_k": _check_count,
    "scheduler_interval": _check_choice(*get_args(SchedulerInterval), None),
}
