"""`Policy`: the settings of a run, frozen and validated, each with its meaning and default.

A value can come from several sources. From highest to lowest precedence, they are: a keyword
argument or command-line option, a ``HOLDFAST_*`` environment variable, a YAML file, a preset, and
the default in this module. ``sources`` reads files, variables and options, and ``kinds`` defines
the allowed values of fields.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, dataclass_transform, get_type_hints

from holdfast.core.errors import PolicyError
from holdfast.core.policy import kinds, sources
from holdfast.core.policy.presets import find_preset

_Class = TypeVar("_Class")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def _layered(cls: type[_Class]) -> type[_Class]:
    """Make a frozen dataclass whose field values can also come from a preset or the environment.

    All values except the defaults are validated.
    """
    layered_class = dataclass(frozen=True, slots=True, kw_only=True)(cls)
    plain_init: Callable[..., None] = layered_class.__init__

    @functools.wraps(plain_init)
    def __init__(self: Any, /, **arguments: Any) -> None:  # noqa: N807
        values = _with_preset({**sources.from_environment(), **arguments})
        checked_values = {
            name: kinds.check(name, field_kinds()[name], value) for name, value in values.items()
        }
        plain_init(self, **checked_values)
        _check_contradictions(self, values)

    layered_class.__init__ = __init__  # type: ignore[assignment, method-assign]
    meanings = sources.meanings_of(Path(__file__), cls.__name__)
    arguments = [f"    {name}: {' '.join(text.split())}" for name, text in meanings.items()]
    layered_class.__doc__ = "\n".join(
        [cls.__doc__ or "", "    Args, one for each field:", *arguments, ""]
    )
    return layered_class


@functools.cache
def field_kinds() -> dict[str, Any]:
    """Return the type of each field, for `kinds.check`."""
    return get_type_hints(Policy, include_extras=True)


def _with_preset(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given values, plus the preset's values for all other fields that the preset sets.

    Args:
        values: Values by field. The key ``"preset"``, if it is present, names the preset.

    Raises:
        PolicyError: H101 for a key that is neither a field nor ``"preset"``, H110 for an unknown
            preset.
    """
    sources.check_keys(values, field_kinds())
    own_values = dict(values)
    given_name = own_values.pop(sources.PRESET, None)
    name = given_name
    if isinstance(given_name, sources.SourcedValue):
        # The first interpretation of a string is the string itself, or None if it means None.
        name = given_name.readings()[0]
    if name is None:
        return own_values
    preset = find_preset(name, sources.describe_sources(given_name))
    preset_values = {
        field: sources.SourcedValue(setting.value, f"preset {name}")
        for field, setting in preset.settings.items()
    }
    return {**preset_values, **own_values}


@_layered
class Policy:
    """The settings of a run.

    Every field can be set as a keyword argument, in a YAML file, or as the environment variable
    ``HOLDFAST_<FIELD>``.
    """

    micro_batch_size: kinds.CountOrAuto = "auto"
    """The largest number of samples in one forward/backward pass. ``"auto"`` starts with the whole
    batch, uses fewer samples only after an out-of-memory error, and tries more again later. A
    number is a fixed maximum. None: batches are never split."""

    grow_after_steps: kinds.Count = 100
    """Steps without an out-of-memory error before a larger micro-batch is tried again. The number
    doubles after each failed trial. A failed trial costs at most two attempts, so one trial every
    100 steps costs at most 2 %."""

    forecast_micro_batch_size: kinds.OptionalCount = None
    """With ``micro_batch_size="auto"``: the micro-batch size to start with, as forecast by
    `holdfast plan`. Larger sizes are tried later, or right after the third step if its memory use
    shows that they fit. None: start with the whole batch."""

    recompute: kinds.FlagOrTexts = True
    """Whether activation checkpointing may be switched on when memory is short, for the modules
    where it saves most. With a list of module names, such as ``["encoder.layers.0"]``, exactly
    these modules are recomputed from the first step on; `holdfast plan` can choose them."""

    check_split: kinds.Flag = True
    """Whether to test, on at most 4 samples and before a batch is first split, that splitting
    leaves the gradient of a loss function unchanged. A loss with in-batch negatives fails this
    test; its batches are then never split."""

    allow_split_with: kinds.Hazards = ()
    """Hazards of splitting to accept, although they change training: ``"batch_norm"`` (statistics
    per micro-batch), ``"buffers"`` (updated once per micro-batch), ``"coupled_loss"`` (loss terms
    across samples)."""

    cpu_malloc_threshold_bytes: kinds.CountOrAuto = "auto"
    """The smallest allocation, in bytes, that glibc returns to the system as soon as it is freed.
    None leaves malloc unchanged. ``"auto"``: 4 MiB if the system may refuse memory (``ulimit -v``
    or ``-d``, strict overcommit), otherwise 32 MiB. With 4 MiB, out-of-memory errors on the CPU are
    recoverable (84 of 84 times, compared with 11 of 84 with glibc's default), but steps with
    activations of that size take twice as long. 32 MiB is faster than glibc's default. A memory
    limit that is set after the guard was created is not noticed. ``benchmarks/malloc_threshold``
    measures both values (glibc 2.36)."""

    max_grad_norm: kinds.Limit = None
    """Largest gradient norm; larger gradients are scaled down to it. None turns clipping off."""

    clip_by: kinds.ClipBy = "global"
    """The gradients over which the norm is computed: all gradients of the step (``"global"``, which
    preserves their direction), the gradients of each ``"optimizer"``, or the gradients of each
    parameter ``"group"`` of each optimizer. Each choice is a different algorithm."""

    provenance: kinds.Flag = True
    """Whether a step with NaN or Inf is replayed to find the operation, module, parameter and
    sample that caused it. Steps without NaN or Inf cost nothing extra."""

    drop_nonfinite_samples: kinds.Flag = False
    """Whether a step with NaN or Inf is repeated without the samples that caused it, if these
    samples are found. False skips the whole step."""

    repeat_step_interval: kinds.OptionalCount = None
    """Optimizer steps from one step that is run twice to the next, to detect hardware that computes
    wrong results. Both passes start from the same state, and loss and gradients are compared bit
    for bit before the weights change. A difference is an event (H504), and training continues with
    the first pass. Such a step takes about twice as long, which costs 0.1 % with 1000, and needs
    memory for another copy of the gradients and buffers. None: no step is repeated."""

    nonfinite_patience: kinds.OptionalCount = 3
    """Consecutive steps that may be skipped because of NaN or Inf before the run rolls back to its
    last good state. None: no limit. The default of 3 is SpeechBrain's."""

    max_rollbacks: kinds.CountOrZero = 2
    """Consecutive rollbacks before the run stops. The count restarts once the run is
    ``nonfinite_patience`` steps past the step that caused the last rollback."""

    spike_action: kinds.SpikeAction = "warn"
    """The strongest response to a spike, which is a loss and gradient norm far above their usual
    values: ``"off"``; ``"warn"``; ``"skip"`` the step; or ``"roll_back"`` to the last good state if
    spikes persist, and skip the batches that led to them. The default only warns, because a new
    task, or a loss term that becomes active later, looks the same."""

    snapshot_interval_steps: kinds.OptionalCount = 100
    """Optimizer steps between snapshots, which are copies of the state in host memory to which a
    rollback returns. With None, or if the copies do not fit into memory, a rollback returns to a
    checkpoint. The default of 100 is how far PaLM's training was rolled back before a spike."""

    decide: kinds.Decide = "auto"
    """When the host reads whether a step was finite. ``"now"``: before the optimizer runs, so a GPU
    waits for the host once in each step. ``"late"``: in the next step, so a GPU never waits. The
    GPU itself then keeps a refused step from changing the weights, the moments and the buffers,
    which needs optimizers created with ``fused=True``. ``"auto"``: late on accelerators if all
    optimizers are fused, otherwise now."""

    diagnose: kinds.Flag = True
    """Whether to look for reasons why the model does not learn. The first steps are checked
    exhaustively, and later steps are sampled."""

    objective: kinds.Objective = "minimize"
    """The meaning of the loss. In ``"adversarial"`` and ``"reinforcement"`` training, its level
    says nothing about progress, so spikes only cause warnings, and rules about a falling loss are
    silent."""

    frozen: kinds.Texts = ()
    """Parameters that are not supposed to learn: module names such as ``"encoder"``, parameter
    names, or shell patterns of these. A name or pattern that matches no parameter raises an error
    when the diagnosis begins."""

    ignore_rules: kinds.Rules = ()
    """Diagnosis rules to silence, such as ``"H808"``."""

    precision: kinds.Precision = "fp32"
    """Autocast type of the forward pass. With ``"fp16"``, holdfast manages the loss scale."""

    save_interval_steps: kinds.CountOrAuto = "auto"
    """Optimizer steps between checkpoints. ``"auto"`` measures how long saves take and chooses the
    interval that minimizes the time lost to saves and to failures (arXiv 2410.18124). A young run
    saves after 5 seconds, and then whenever its age has doubled since its last save. None: no
    checkpoints are written, so there is no checkpoint to roll back to; a run directory that already
    has checkpoints is still resumed."""

    save_interval_minutes: kinds.Limit = None
    """The longest time from one checkpoint to the next, in minutes, regardless of
    ``save_interval_steps``. A save is due at the first step after that time. None: no such limit.
    The field corresponds to SpeechBrain's ``ckpt_interval_minutes``."""

    async_save: kinds.Flag = True
    """Whether checkpoints are written while training continues, from a copy of the state in host
    memory. Exceptions are the first and the last checkpoint of a run, and any checkpoint whose copy
    would take more than a quarter of the available memory."""

    save_overhead: kinds.Share = 0.01
    """The largest share of training time that saves may take, for ``save_interval_steps="auto"``;
    on the CPU, this includes the CPU time of the writer thread. For comparison, CheckFreq
    (FAST '21) allows 0.035."""

    mean_time_between_failures_hours: kinds.Hours = 24.0
    """Expected time from one failure of the job to the next, including preemptions and crashes of
    your own code, for ``save_interval_steps="auto"``. The default of 24 is the longest time that
    Google Cloud runs a preemptible machine. If only hardware failed, a node of 8 GPUs would run for
    150 to 260 days (arXiv 2410.21680, 2407.21783)."""

    keep_latest_k: kinds.Count = 3
    """The number of newest good checkpoints to keep; at least 1."""

    mirror: kinds.UrlOrNone = None
    """Where the ``keep_latest_k`` newest checkpoints are copied while training continues: the URL
    of a folder that fsspec can reach, such as ``"s3://bucket/run"``, or the path of another disk. A
    run that starts in an empty directory, or with an older checkpoint than the mirror, resumes from
    the mirror. Each run needs a folder of its own. None: no copies."""

    scheduler_interval: kinds.StepEpochOrNone = "step"
    """When the learning-rate scheduler is stepped: after each optimizer ``"step"`` that moved the
    weights, after each ``"epoch"``, or never (None: you step it yourself)."""

    stop_signals: kinds.StopSignals = ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT")
    """Signals that stop the run: it saves a checkpoint at the end of the batch and leaves the loop.
    After SIGINT (Ctrl-C), `batches` then raises KeyboardInterrupt. A second signal ends the process
    immediately, except SIGUSR1 and SIGUSR2, which are then ignored. In a notebook, a second SIGINT
    raises KeyboardInterrupt instead. If SIGHUP or SIGINT is ignored when the guard is created
    (``nohup``, a background job), it stays ignored."""

    max_time: kinds.TimeLimit = "auto"
    """The time from the start of the process by which the run must have stopped: ``"11h30m"``,
    ``"90m"``, ``"45s"``, ``"1d2h"``, ``"11:30:00"``, or ``"1-02:00:00"`` as in Slurm. The run saves
    and stops as soon as another step, as long as the longest one so far, might leave too little
    time to save. Under Slurm, it also stops before the end of the job. ``"auto"``: it stops only
    before the end of the Slurm job, if there is one. None: no limit, not even under Slurm."""

    stop_exit_code: kinds.ExitCodeOrNone = None
    """Exit code after a signal, `holdfast stop` or ``max_time`` stops the run: `batches` saves and
    then raises ``SystemExit`` with this code, so code after the loop does not run. None: the loop
    ends, and the script continues after it."""

    notify: kinds.NotifyOrNone = None
    """Where to send a message when the run ends, fails or resumes, when a step has NaN or Inf, and
    when the disk is nearly full. An ``https://`` URL is a webhook (ntfy, Slack and Discord are
    recognized), and anything else is a command that is run without a shell. Messages never delay a
    step, and delay the end of the process by at most 5 seconds. The value is not recorded. None:
    no messages, except for those of ``holdfast run --notify``."""

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str], **overrides: Any) -> Policy:
        """Return a policy with the settings in a YAML file, which must contain a mapping.

        ``HOLDFAST_*`` environment variables override the file, and ``overrides`` override both.

        Raises:
            PolicyError: H101 for an unknown key, H102 for an invalid value, H103 for a file that is
                not a YAML mapping, H110 for an unknown preset.

        Example:
            >>> import tempfile, pathlib
            >>> file = pathlib.Path(tempfile.mkdtemp(), "policy.yaml")
            >>> _ = file.write_text("max_grad_norm: 5.0")
            >>> Policy.from_yaml(file, keep_latest_k=2).max_grad_norm
            5.0
        """
        return cls(**{**sources.from_yaml(Path(path)), **sources.from_environment(), **overrides})

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> Policy:
        """Return a policy with the settings of a preset, such as ``"tts"`` for text to speech.

        ``HOLDFAST_*`` environment variables override the preset, and ``overrides`` override both.
        You can also select a preset with ``preset: tts`` in a YAML file or with
        ``HOLDFAST_PRESET=tts``. The reference page of `Policy` lists all presets, with the source
        of each value.

        Raises:
            PolicyError: H110 for an unknown preset; H101 or H102 for an invalid override.

        Example:
            >>> Policy.preset("tts").max_grad_norm
            1.0
        """
        return cls(**{sources.PRESET: name, **overrides})

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Add ``--preset``, ``--policy FILE`` and one option for each field to a program's parser.

        An example of a field's option is ``--max-grad-norm 2.0``.

        Args:
            parser: Your program's parser, which must not have options with the same names.
        """
        defaults = {field.name: field.default for field in dataclasses.fields(Policy)}
        sources.add_options(parser, defaults, sources.meanings_of(Path(__file__), "Policy"))

    @classmethod
    def from_arguments(cls, namespace: argparse.Namespace) -> Policy:
        """Return the policy that the user specified with the options of `add_arguments`.

        The options override all other sources.

        Args:
            namespace: The result of ``parse_args``.

        Raises:
            PolicyError: H101 for an unknown key, H102 for an invalid value, H103 for a file that is
                not a YAML mapping, H109 for fields that exclude each other, H110 for an unknown
                preset.

        Example:
            >>> parser = argparse.ArgumentParser()
            >>> Policy.add_arguments(parser)
            >>> arguments = parser.parse_args(["--preset", "tts", "--keep-latest-k", "2"])
            >>> policy = Policy.from_arguments(arguments)
            >>> policy.max_grad_norm, policy.keep_latest_k
            (1.0, 2)
        """
        file, values = sources.from_options(namespace, field_kinds())
        return cls.of(file, **values)

    @classmethod
    def of(
        cls, policy: Policy | Mapping[str, Any] | str | os.PathLike[str] | None, **overrides: Any
    ) -> Policy:
        """Convert the argument `policy` to a `Policy`, and apply the overrides.

        Args:
            policy: A policy, a dict of fields, the path of a YAML file, or None for the defaults.
            **overrides: Values of fields, which override those from `policy`.

        Raises:
            PolicyError: H101 for an unknown key, H102 for an invalid value, H103 for a file that is
                not a YAML mapping, H109 for fields that exclude each other, H110 for an unknown
                preset.
        """
        if isinstance(policy, Mapping):
            return cls(**{**policy, **overrides})
        if isinstance(policy, Policy):
            return policy.replace(**overrides) if overrides else policy
        if policy is None:
            return cls(**overrides)
        return cls.from_yaml(policy, **overrides)

    def replace(self, **overrides: Any) -> Policy:
        """Return a copy with some fields changed. ``preset=`` changes all fields that it sets.

        Raises:
            PolicyError: H101 for an unknown field, H102 for an invalid value, H109 for fields that
                exclude each other, H110 for an unknown preset.
        """
        return Policy(**{**dataclasses.asdict(self), **_with_preset(overrides)})


# --- fields that exclude each other ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """Two fields that exclude each other.

    Args:
        fields: The names of the fields. The first requests something that the second rules out.
        applies: Takes a policy and returns whether it contains this contradiction.
        because: Why the fields exclude each other, for the error message.
        fix: How to resolve the contradiction, for the error message.
    """

    fields: tuple[str, str]
    applies: Callable[[Policy], bool]
    because: str
    fix: str


CONTRADICTIONS = (
    Contradiction(
        fields=("clip_by", "max_grad_norm"),
        applies=lambda policy: policy.clip_by != "global" and policy.max_grad_norm is None,
        because="there is no limit to clip to",
        fix="pass max_grad_norm, for instance 1.0, or clip_by='global'.",
    ),
    Contradiction(
        fields=("save_interval_minutes", "save_interval_steps"),
        applies=lambda policy: (
            policy.save_interval_minutes is not None and policy.save_interval_steps is None
        ),
        because="no checkpoints are written",
        fix="pass save_interval_steps='auto' or a number, or omit save_interval_minutes.",
    ),
    Contradiction(
        fields=("mirror", "save_interval_steps"),
        applies=lambda policy: policy.mirror is not None and policy.save_interval_steps is None,
        because="no checkpoints are written",
        fix="pass save_interval_steps='auto' or a number, or omit mirror.",
    ),
    Contradiction(
        fields=("drop_nonfinite_samples", "provenance"),
        applies=lambda policy: policy.drop_nonfinite_samples and not policy.provenance,
        because="only provenance can find the samples to drop",
        fix="set provenance=True, or omit drop_nonfinite_samples.",
    ),
    Contradiction(
        fields=("allow_split_with", "micro_batch_size"),
        applies=lambda policy: bool(policy.allow_split_with) and policy.micro_batch_size is None,
        because="no batch is ever split",
        fix="use micro_batch_size='auto', or omit allow_split_with.",
    ),
    Contradiction(
        fields=("forecast_micro_batch_size", "micro_batch_size"),
        applies=lambda policy: (
            policy.forecast_micro_batch_size is not None and policy.micro_batch_size != "auto"
        ),
        because="a fixed micro-batch size leaves nothing to forecast",
        fix="use micro_batch_size='auto', or omit forecast_micro_batch_size.",
    ),
)


def _check_contradictions(policy: Policy, values: Mapping[str, Any]) -> None:
    """Check that no two fields of a policy exclude each other.

    Args:
        policy: The policy to check.
        values: The values that do not come from the defaults, by field, with their sources.

    Raises:
        PolicyError: H109 if two fields exclude each other. The message contains both fields with
            their values and sources.
    """
    for contradiction in CONTRADICTIONS:
        if contradiction.applies(policy):
            settings = [f"{field}={getattr(policy, field)!r}" for field in contradiction.fields]
            given = [value for field, value in values.items() if field in contradiction.fields]
            raise PolicyError(
                f"{' with '.join(settings)}{sources.describe_sources(*given)}",
                limit=contradiction.because,
                fix=contradiction.fix,
                rule="H109",
            )
