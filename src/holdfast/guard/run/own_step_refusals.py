"""The errors for optimizer steps that a loop takes itself, and that no checkpoint could contain."""

from __future__ import annotations

from collections.abc import Mapping

from torch.optim import Optimizer

from holdfast.core.errors import BatchError
from holdfast.core.policy.policy import Policy

# Settings that only `Guard.step` carries out, with the values that ask for nothing. A loop that
# relies on another value would train without it and see no difference.
_SETTINGS_OF_GUARDED_STEPS: Mapping[str, tuple[object, ...]] = {
    "max_grad_norm": (None,),
    "precision": ("fp32",),
    "micro_batch_size": ("auto", None),
    "drop_nonfinite_samples": (False,),
    "repeat_step_interval": (None,),
    "spike_action": ("warn",),
}


def step_of_unknown_optimizer(optimizer: Optimizer) -> BatchError:
    """Return the error for an optimizer that changes guarded parameters without being guarded."""
    return BatchError(
        f"the loop stepped an optimizer ({type(optimizer).__name__}) that the guard does not hold",
        limit="it changes parameters of a guarded model, and no checkpoint would hold its state",
        fix="pass it to Guard (optimizer=...).",
        rule="H212",
    )


def step_outside_guard(name: str, why: str) -> BatchError:
    """Return the error for a step in a run that must take all its steps with `Guard.step`.

    Args:
        name: The name of the optimizer.
        why: Why the run must take them so, as a clause.
    """
    return BatchError(
        f"the loop stepped optimizer {name!r} outside of guard.step",
        limit=why,
        fix=(
            "replace zero_grad, backward and step with guard.step(batch, loss_fn), where loss_fn"
            " returns the loss. To step one of several optimizers: guard.step(batch, loss_fn,"
            f" optimizer={name!r})."
        ),
        rule="H212",
    )


def settings_without_effect(name: str, policy: Policy) -> BatchError | None:
    """Return the error for settings that a loop with its own steps would not get, or None."""
    ignored = {
        setting: getattr(policy, setting)
        for setting, unused in _SETTINGS_OF_GUARDED_STEPS.items()
        if getattr(policy, setting) not in unused
    }
    if not ignored:
        return None
    listed = ", ".join(f"{setting}={value!r}" for setting, value in ignored.items())
    defaults = ", ".join(
        f"{setting}={_SETTINGS_OF_GUARDED_STEPS[setting][0]!r}" for setting in ignored
    )
    return BatchError(
        f"the loop stepped optimizer {name!r} itself, but the run has {listed}",
        limit="only guard.step applies such settings; they have no effect on steps of the loop",
        fix=f"do this in the loop and set {defaults}, or take the steps with guard.step.",
        rule="H212",
    )


def mixed_steps(problem: str) -> BatchError:
    """Return the error for a run that takes some steps with `Guard.step`, and some without.

    Args:
        problem: What the script did, as a clause.
    """
    return BatchError(
        problem,
        limit="a run takes all its steps with guard.step, or none of them",
        fix=(
            "use guard.step(batch, loss_fn, optimizer=...) for every optimizer of the guard, or"
            " call backward and optimizer.step() for every one of them."
        ),
        rule="H212",
    )
