"""The settings of a run.

Frozen, validated, each with its meaning, default and the source of the default.

Where a value comes from, strongest first: a keyword argument or an option of the command line, a
    ``HOLDFAST_*``
variable, a YAML file, a preset, the default here. The sources are read in ``sources``; what each
field may be stands in ``kinds``, and pydantic checks it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, dataclass_transform, get_type_hints

from holdfast.core.errors import PolicyError
from holdfast.core.policy import kinds, sources
from holdfast.core.policy.presets import find_preset

_Class = TypeVar("_Class")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def _layered(cls: type[_Class]) -> type[_Class]:
    """Let a preset and the environment fill the fields that the caller did not give, and check
    what is given.
    """
    made = dataclass(frozen=True, slots=True, kw_only=True)(cls)
    plain_init: Callable[..., None] = made.__init__

    @functools.wraps(plain_init)
    def __init__(self: Any, /, **arguments: Any) -> None:  # noqa: N807
        given = _above_preset({**sources.from_environment(), **arguments})
        plain_init(
            self,
            **{name: kinds.check(name, fields()[name], value) for name, value in given.items()},
        )
        for what, because, fix in _contradictions(self):
            source = sources.named(*(value for name, value in given.items() if f"{name}=" in what))
            raise PolicyError(what + source, limit=because, fix=fix, rule="H109")

    made.__init__ = __init__  # type: ignore[assignment, method-assign]
    meanings = sources.meanings_of(Path(__file__), cls.__name__)
    listed = [f"    {name}: {' '.join(text.split())}" for name, text in meanings.items()]
    made.__doc__ = "\n".join([cls.__doc__ or "", "    Args, one for each field:", *listed, ""])
    return made


@functools.cache
def fields() -> dict[str, Any]:
    """Return what each field may be, as `kinds.check` takes it."""
    return get_type_hints(Policy, include_extras=True)


def _above_preset(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is given by field, with the values of the preset that it names below it.

    H101 for another key.
    """
    sources.check_keys(given, fields())
    others = dict(given)
    named = others.pop(sources.PRESET, None)
    name = named.readings()[0] if isinstance(named, sources.Sourced) else named
    if name is None:
        return others
    below = find_preset(name, sources.named(named)).values().items()
    return {**{key: sources.Sourced(value, f"preset {name}") for key, value in below}, **others}


@_layered
class Policy:
    """How a run is kept alive.

    Every field can be given by name, in YAML, or as ``HOLDFAST_<FIELD>``.
    """

    micro_batch_size: kinds.CountOrAuto = "auto"
    """Most samples in one forward/backward.

    ``"auto"``: the whole batch, less only after out-of-memory, and
    more again later. A number: never more than this. None: never split.
    """

    grow_after_steps: kinds.Count = 100
    """Clean steps before a larger micro-batch is tried again; doubled after each trial that fails.
    A failed trial costs at most two attempts, so trying once in 100 steps costs at most 2 %."""

    forecast_micro_batch_size: kinds.OptionalCount = None
    """With ``micro_batch_size="auto"``: the size to start with, as `holdfast plan` forecast it.

    More is tried later,
    and at once where the third step leaves room for it. None: the whole batch.
    """

    recompute: kinds.FlagOrTexts = True
    """Whether activation checkpointing may be switched on when memory is short, for what saves
    most. Names, such as ``["encoder.layers.0"]``: these are recomputed from the first step on, and
    no others, as `holdfast plan` chose them."""

    check_split: kinds.Flag = True
    """Whether to test, once per loss function and on at most 4 samples, that splitting a batch
    leaves its gradient unchanged. Losses with in-batch negatives fail this test and are then never
    split."""

    allow_split_with: kinds.Hazards = ()
    """Hazards that you accept by name, although splitting then changes training.

    ``"batch_norm"`` (statistics
    of each micro-batch), ``"buffers"`` (updated once per micro-batch), ``"coupled_loss"`` (terms
    across samples).
    """

    cpu_malloc_threshold_bytes: kinds.CountOrAuto = "auto"
    """Size in bytes from which glibc gives freed memory back to the system at once; None leaves
    malloc alone. ``"auto"``: 4 MiB where memory can be refused (``ulimit -v`` or ``-d``, strict
    overcommit), which makes out-of-memory on the CPU recoverable (84 of 84, where glibc's default
    recovered 11 of 84) and doubles the time of steps with activations of that size; else 32 MiB,
    which is faster than glibc's default. A limit that is set after the guard was made is not seen.
    ``benchmarks/malloc_threshold`` measures both (glibc 2.36)."""

    max_grad_norm: kinds.Limit = None
    """Largest gradient norm; larger gradients are scaled down to it. None turns clipping off."""

    clip_by: kinds.ClipBy = "global"
    """Over what the norm is taken.

    All gradients of the step (keeps the direction), each ``"optimizer"``, or
    each parameter ``"group"`` of each optimizer. They are different algorithms.
    """

    provenance: kinds.Flag = True
    """Whether a step with NaN or Inf is replayed to name the operation, module, parameter and
    sample that it came from. Costs nothing until it happens."""

    drop_nonfinite_samples: kinds.Flag = False
    """Whether a step with NaN or Inf is made again without the samples that it came from, where
    they are found; False skips the whole step."""

    nonfinite_patience: kinds.OptionalCount = 3
    """Steps in a row that may be skipped for NaN or Inf before the run returns to its last good
    checkpoint. None: skip for ever. 3: SpeechBrain's default."""

    max_rollbacks: kinds.CountOrZero = 2
    """Returns to a checkpoint in a row before the run stops. A row ends ``nonfinite_patience``
    steps beyond the step that the last return came from."""

    spike_action: kinds.SpikeAction = "warn"
    """The strongest answer to a loss and gradient norm that stand far out: ``"off"``.

    ``"warn"``; ``"skip"`` such
    steps; ``"roll_back"`` to the last good state when they persist, and pass over the batches that
    led there. Not by
    default: a new task, or a term of the loss that sets in, looks the same.
    """

    snapshot_interval_steps: kinds.OptionalCount = 100
    """Optimizer steps between copies of the state in host memory, to which a rollback returns.

    None are kept where
    they do not fit, and None keeps none: a rollback then returns to a checkpoint. 100: PaLM's
        restart distance.
    """

    diagnose: kinds.Flag = True
    """Whether to look for the reasons why a model does not learn.

    Exact contracts in the first steps, samples
    later.
    """

    objective: kinds.Objective = "minimize"
    """What the loss means. In ``"adversarial"`` and ``"reinforcement"`` training its level says
    nothing, so spikes are only warned of and rules about a falling loss are silent."""

    frozen: kinds.Texts = ()
    """What is meant not to learn.

    Names of modules such as ``"encoder"``, of parameters, or shell patterns of these.
    One that fits no parameter is an error when the diagnosis begins.
    """

    ignore_rules: kinds.Rules = ()
    """Rules of the diagnosis that shall be silent, such as ``"H808"``."""

    precision: kinds.Precision = "fp32"
    """Autocast type of the forward pass. ``"fp16"`` brings a loss scaler that holdfast owns."""

    save_interval_steps: kinds.CountOrAuto = "auto"
    """Optimizer steps between checkpoints. ``"auto"``: by time, where saving and lost work together
    cost least (arXiv 2410.18124), from what saves take; in a young run after 5 seconds, then
    whenever it is twice as old as at its last one. None writes none, so there is nothing to roll
    back to; a run directory that holds checkpoints is resumed all the same."""

    save_interval_minutes: kinds.Limit = None
    """Most minutes from one checkpoint to the next, whatever ``save_interval_steps`` says.

    One is due at the first
    step after that. None: no such limit. SpeechBrain's ``ckpt_interval_minutes``.
    """

    async_save: kinds.Flag = True
    """Whether checkpoints are written while training goes on, from a copy of the state in host
    memory. The first and the last of a run are not; nor is any where the copy would take more than
    a quarter of the memory available."""

    save_overhead: kinds.Share = 0.01
    """The largest share of the time that saves may take from training, for
    ``save_interval_steps="auto"``; on the CPU also of what their writer computes. 0.01: CheckFreq
    (FAST '21) allows itself 0.035."""

    mean_time_between_failures_hours: kinds.Hours = 24.0
    """Expected time from one failure of the job to the next, crashes of your own and preemptions
    among them, for ``save_interval_steps="auto"``. 24: Google Cloud ends its preemptible machines
    after that at the latest. Hardware alone lets a node of 8 GPUs live for 150 to 260 days (arXiv
    2410.21680, 2407.21783)."""

    keep_latest_k: kinds.Count = 3
    """Good checkpoints to keep, the newest; at least 1."""

    scheduler_interval: kinds.StepEpochOrNone = "step"
    """When the learning-rate scheduler is advanced: after each optimizer ``"step"`` that moved the
    weights, after each ``"epoch"``, or never (None: you call it)."""

    stop_signals: kinds.StopSignals = ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT")
    """Signals that stop the run.

    It saves a checkpoint at the end of the batch and leaves the loop. After SIGINT
    (Ctrl-C) `batches` then raises KeyboardInterrupt. A second signal ends the process at once. If
    SIGHUP or SIGINT is ignored when the guard is made (``nohup``, a background job), it stays
    ignored.
    """

    stop_exit_code: kinds.ExitCodeOrNone = None
    """Exit code after a stop by a signal.

    `batches` saves and then raises ``SystemExit`` with this code, so that the
    code after the loop does not run. None: the loop ends, and the script continues after it.
    """

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str], **overrides: Any) -> Policy:
        """Read a policy from a YAML mapping.

        ``HOLDFAST_*`` variables and then ``overrides`` win over it.

        Raises:
            PolicyError: H101 for an unknown key, H102 for a value, H103 for a file that is no YAML
                mapping, H110 for an unknown preset.

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
        """Return the policy of a domain.

        ``HOLDFAST_*`` variables and then ``overrides`` win over it.

        The same is meant by ``preset: tts`` in a YAML file and by ``HOLDFAST_PRESET=tts``. The
            reference of
        `Policy` lists all of them, with the source of each figure.

        Raises:
            PolicyError: H110 for an unknown name, H101 or H102.

        Example:
            >>> Policy.preset("tts").max_grad_norm
            1.0
        """
        return cls(**{sources.PRESET: name, **overrides})

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Add ``--preset``, ``--policy FILE`` and an option for each field, such as
        ``--max-grad-norm 2.0``.

        Args:
            parser: Of your program. Options that it has already must not bear the same names.
        """
        defaults = {field.name: field.default for field in dataclasses.fields(Policy)}
        sources.add_options(parser, defaults, sources.meanings_of(Path(__file__), "Policy"))

    @classmethod
    def from_arguments(cls, namespace: argparse.Namespace) -> Policy:
        """Return the policy that the options of `add_arguments` ask for.

        Only given ones win over the other sources.

        Raises:
            PolicyError: H101, H102, H103, H109 or H110.

        Example:
            >>> parser = argparse.ArgumentParser()
            >>> Policy.add_arguments(parser)
            >>> arguments = parser.parse_args(["--preset", "tts", "--keep-latest-k", "2"])
            >>> policy = Policy.from_arguments(arguments)
            >>> policy.max_grad_norm, policy.keep_latest_k
            (1.0, 2)
        """
        file, given = sources.from_options(namespace, fields())
        return cls.of(file, **given)

    @classmethod
    def of(
        cls, policy: Policy | Mapping[str, Any] | str | os.PathLike[str] | None, **overrides: Any
    ) -> Policy:
        """Return a policy from what a caller may pass.

        One, a dict, the path of a YAML file, or None for defaults.

        Raises:
            PolicyError: H101, H102, H103, H109 or H110.
        """
        if isinstance(policy, Mapping):
            return cls(**{**policy, **overrides})
        if isinstance(policy, Policy):
            return policy.replace(**overrides) if overrides else policy
        return cls(**overrides) if policy is None else cls.from_yaml(policy, **overrides)

    def replace(self, **overrides: Any) -> Policy:
        """Return a policy with some fields changed; a preset changes those that it names.

        Raises:
            PolicyError: H101, H102, H109 or H110.
        """
        return Policy(**{**dataclasses.asdict(self), **_above_preset(overrides)})


def _contradictions(policy: Policy) -> Iterator[tuple[str, str, str]]:
    """Yield what a policy asks for with one field and rules out with another, why that is so,
    and the fix.
    """
    size = policy.micro_batch_size
    if policy.clip_by != "global" and policy.max_grad_norm is None:
        what = f"clip_by={policy.clip_by!r} with max_grad_norm=None"
        yield (
            what,
            "there is no limit to clip to",
            "pass max_grad_norm, for instance 1.0, or clip_by='global'.",
        )
    if policy.save_interval_minutes is not None and policy.save_interval_steps is None:
        what = (
            f"save_interval_minutes={policy.save_interval_minutes!r} with save_interval_steps=None"
        )
        yield (
            what,
            "no checkpoints are written",
            "pass save_interval_steps='auto' or a number, or drop the minutes.",
        )
    if policy.drop_nonfinite_samples and not policy.provenance:
        what = "drop_nonfinite_samples=True with provenance=False"
        yield what, "the samples are not looked for", "leave provenance on: it finds the samples."
    if policy.allow_split_with and size is None:
        what = f"allow_split_with={policy.allow_split_with!r} with micro_batch_size=None"
        yield what, "no batch is ever split", "use micro_batch_size='auto', or allow nothing."
    if policy.forecast_micro_batch_size is not None and size != "auto":
        what = (
            f"forecast_micro_batch_size={policy.forecast_micro_batch_size} with"
            f" micro_batch_size={size!r}"
        )
        yield (
            what,
            "a size that is given is not forecast",
            'use micro_batch_size="auto", or drop the forecast.',
        )
