"""`Observations`: all measurements of a run, as plain counters and short histories.

Observers fill in the fields, and rules read them. All fields can be written as JSON, so rules can
be tested on a recording. This module uses no tensors and makes no decisions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# Minimum number of examined calls of a loss before its flags are meaningful.
MIN_CALLS = 3


@dataclass(slots=True, kw_only=True)
class ObservedOptimizer:
    """One optimizer: its settings, its steps and its gradients."""

    # Name of the optimizer's class.
    kind: str = ""
    # Number of steps, and how many of them were sampled.
    steps: int = 0
    observed: int = 0
    # Whether `step` is called with a closure, which computes the loss inside the step.
    uses_closure: bool = False
    # Pairs ``(step, loss)``. In long runs, only a subset of the steps is kept.
    losses: list[tuple[int, float]] = field(default_factory=list)
    # Number of losses that were NaN or Inf, and the step of the first one.
    nonfinite_losses: int = 0
    first_nonfinite_loss: int | None = None
    # Total gradient norms of sampled steps: the first ones and the newest ones.
    gradient_norms: list[float] = field(default_factory=list)

    # Number of parameters in the optimizer, and how many of them have ``requires_grad=False``.
    tensors: int = 0
    frozen: int = 0
    # Number of parameters that are not in any observed model, how many of them have a gradient, and
    # how many of them were in an observed model when observation began.
    foreign: int = 0
    foreign_with_gradient: int = 0
    replaced: int = 0

    # The largest learning rate of any parameter group, in the last step and over all steps.
    lr: float = 0.0
    largest_lr: float = 0.0
    # Number of consecutive steps, up to the last one, with a learning rate of practically 0.
    zero_lr_steps: int = 0
    # Number of consecutive steps, up to the last one, with a learning rate below a thousandth of
    # the largest one.
    low_lr_steps: int = 0
    weight_decay: float = 0.0
    maximize: bool = False

    # Number of sampled steps in which any parameter had a gradient.
    with_gradient_steps: int = 0
    # Number of consecutive sampled steps, up to the last one, in which no parameter had a gradient.
    no_gradient_steps: int = 0
    # Number of consecutive sampled steps, up to the last one, in which all gradients were exactly
    # 0.
    zero_gradient_steps: int = 0
    # Number of sampled steps with NaN or Inf in a gradient. For the first such step: the names of
    # some affected parameters, and the step number.
    nonfinite_gradients: int = 0
    nonfinite_names: list[str] = field(default_factory=list)
    first_nonfinite_gradient: int | None = None
    # Number of sampled steps that changed any weight.
    moved: int = 0

    # Number of steps in which `AccumulationCheck` saw a backward pass. The counts `leaks`,
    # `reversed` and `zeroed` include only these steps.
    checked: int = 0
    # Number of consecutive steps, up to the last one, whose gradients were added to the gradients
    # of the previous step.
    leaks: int = 0
    # Number of steps whose gradient was reversed or set to zero between backward and the optimizer
    # step.
    reversed: int = 0
    zeroed: int = 0

    @property
    def gradient_failed_first(self) -> bool:
        """Whether NaN or Inf appeared in a gradient before it appeared in a loss."""
        if self.first_nonfinite_gradient is None:
            return False
        if self.first_nonfinite_loss is None:
            return True
        return self.first_nonfinite_gradient < self.first_nonfinite_loss


@dataclass(slots=True, kw_only=True)
class ObservedModel:
    """One model: which weights learn, and in which mode it runs."""

    # Total number of elements of all parameters that are meant to learn.
    weights: int = 0
    # Trainable parameters that are not in any optimizer: some names, their number, their total
    # number of elements, how many had a gradient, and whether any of them changed.
    outside: list[str] = field(default_factory=list)
    outside_count: int = 0
    outside_weights: int = 0
    outside_with_gradient: int = 0
    outside_changed: bool = False
    # Parameters that had no gradient in any sampled step: some names, their number, their total
    # number of elements, and whether the model's first trainable parameter is among them.
    never_gradient: list[str] = field(default_factory=list)
    never_gradient_count: int = 0
    never_gradient_weights: int = 0
    never_gradient_first: bool = False
    # Names of matrices whose rows are all equal.
    symmetric: list[str] = field(default_factory=list)
    # Whether any parameter has changed since observation began.
    changed: bool = False
    # Names of running statistics (for example of batch norm) that contain NaN or Inf.
    nonfinite_buffers: list[str] = field(default_factory=list)
    # Number of sampled steps.
    observed: int = 0
    # Names of modules that behave differently in training: dropout and batch norm.
    mode_dependent: list[str] = field(default_factory=list)
    # Number of sampled steps in evaluation mode.
    eval_steps: int = 0
    # Number of validations, and how many of them ran entirely in training mode.
    validations: int = 0
    train_mode_validations: int = 0
    # Whether the first layer normalizes the input.
    normalizes_input: bool = False


@dataclass(slots=True, kw_only=True)
class ObservedScheduler:
    """One scheduler: how often it was stepped per optimizer step."""

    kind: str = ""
    optimizer_steps: int = 0
    # How often the scheduler was stepped in total, and before the first optimizer step.
    advanced: int = 0
    before_first: int = 0
    # Number of intervals between two optimizer steps in which the scheduler was stepped exactly
    # once, and in which it was stepped several times.
    advanced_once: int = 0
    advanced_several: int = 0
    # The patience of a ReduceLROnPlateau scheduler.
    patience: int | None = None
    # The scheduler's ``T_max`` or ``step_size``, in scheduler steps.
    period: int | None = None


@dataclass(slots=True, kw_only=True)
class ObservedLayer:
    """One parameter, in the sampled steps of its optimizer."""

    # Number of dimensions of the parameter.
    dims: int = 0
    # Number of sampled steps, how many of them had a gradient, and in how many of them the gradient
    # was exactly 0.
    steps: int = 0
    with_gradient: int = 0
    zero_gradient: int = 0
    nonfinite: bool = False
    # Norm of an update relative to the norm of the parameter: the median over all steps, and the
    # largest among the first steps.
    ratio: float | None = None
    largest_ratio: float | None = None
    # Median over steps of the root mean square of the gradient's elements.
    gradient_rms: float | None = None
    first_weight_rms: float | None = None
    last_weight_rms: float | None = None


@dataclass(slots=True, kw_only=True)
class ObservedLoss:
    """One place in the training script where a loss is computed."""

    function: str = ""
    # Number of calls, and how many of them had their arguments examined.
    calls: int = 0
    examined: int = 0
    # For each flag, such as "softmax_input", how many examined calls raised it. See
    # `losses.arguments.CHECKS`.
    flags: dict[str, int] = field(default_factory=dict)
    # The two shapes that were broadcast against each other, formatted for messages.
    shapes: str = ""
    first: float | None = None
    values: list[float] = field(default_factory=list)
    # Loss of the best constant prediction.
    baseline: float | None = None
    # For each batch, newest last: the loss of the best constant prediction minus the model's loss.
    gains: list[float] = field(default_factory=list)
    # For each call, the sign (1 or -1) with which the loss enters the minimized objective.
    signs: list[int] = field(default_factory=list)
    labelled_calls: int = 0
    # Mean number of distinct labels per batch, and the number expected for shuffled data.
    distinct_labels: float | None = None
    expected_labels: float | None = None
    # Mean squared target, which is the squared error of predicting 0.
    target_scale: float | None = None

    def always(self, flag: str) -> bool:
        """Return whether enough calls were examined, and at least 90% of them raised a flag."""
        return self.examined >= MIN_CALLS and self.flags.get(flag, 0) >= 0.9 * self.examined

    def mostly(self, flag: str) -> bool:
        """Return whether enough calls were examined, and more than half of them raised a flag."""
        return self.examined >= MIN_CALLS and self.flags.get(flag, 0) > 0.5 * self.examined


@dataclass(slots=True, kw_only=True)
class ObservedInput:
    """The inputs of one model."""

    # Number of calls, and how many of them had their inputs examined.
    calls: int = 0
    examined: int = 0
    # Number of examined batches in which all elements have the same value.
    flat: int = 0
    # Number of batches with NaN or +Inf.
    nonfinite: int = 0
    # Medians over the examined batches: of the largest absolute value, and of the absolute mean
    # divided by the standard deviation.
    largest: float | None = None
    offset: float | None = None


@dataclass(slots=True, kw_only=True)
class Observations:
    """All measurements of a run.

    Each dict is keyed by the name of what it describes: an optimizer, model, scheduler, parameter
    or loss site. Inputs are keyed by the name of their model.
    """

    # Number of steps of the optimizer that has stepped most often, and planned number of steps.
    steps: int = 0
    total_steps: int | None = None
    ended: bool = False
    objective: str = "minimize"
    # Number of backward passes, in total and since the last optimizer step.
    backwards: int = 0
    backwards_since_step: int = 0
    # Number of consecutive sampled steps in which gradients were clipped before backward computed
    # them, but not afterwards.
    early_clips: int = 0
    # Number of trainable parameters that a forward pass uses although they are in neither a model
    # nor an optimizer.
    strays: int = 0
    optimizers: dict[str, ObservedOptimizer] = field(default_factory=dict)
    models: dict[str, ObservedModel] = field(default_factory=dict)
    schedulers: dict[str, ObservedScheduler] = field(default_factory=dict)
    layers: dict[str, ObservedLayer] = field(default_factory=dict)
    losses: dict[str, ObservedLoss] = field(default_factory=dict)
    inputs: dict[str, ObservedInput] = field(default_factory=dict)
    # For each evaluation: the step, the training loss and the validation loss.
    validations: list[tuple[int, float | None, float]] = field(default_factory=list)
    # Attention alignment of a speech synthesis model (see `alignment.alignment_facts`).
    alignment: dict[str, float] | None = None

    @property
    def minimizes_one_loss(self) -> bool:
        """Whether one optimizer minimizes one loss, so that its level and sign are meaningful."""
        return self.objective == "minimize" and len(self.optimizers) == 1

    @property
    def had_nonfinite(self) -> bool:
        """Whether any loss or gradient was NaN or Inf."""
        return any(
            optimizer.nonfinite_losses or optimizer.nonfinite_gradients
            for optimizer in self.optimizers.values()
        )
