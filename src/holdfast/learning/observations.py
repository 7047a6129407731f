"""`Observations`: everything measured about a run, as plain counters and short histories.

Observers fill them in, and rules read them. Everything can be written as JSON, so a rule can be
tested on a recording. There are no tensors and no decisions here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# How many examined calls of a loss are needed before its flags mean anything.
MIN_CALLS = 3


@dataclass(slots=True, kw_only=True)
class ObservedOptimizer:
    """One optimizer: its settings, its steps and its gradients."""

    # The name of its class.
    kind: str = ""
    # The number of steps, and how many of them were sampled.
    steps: int = 0
    observed: int = 0
    # Whether `step` is called with a closure, so that the loss is computed inside the step.
    uses_closure: bool = False
    # Pairs of step and loss, thinned out in long runs.
    losses: list[tuple[int, float]] = field(default_factory=list)
    # The number of losses that were NaN or Inf, and the step of the first one.
    nonfinite_losses: int = 0
    first_nonfinite_loss: int | None = None
    # Norms of all gradients together in sampled steps: the first ones and the newest ones.
    gradient_norms: list[float] = field(default_factory=list)

    # Number of parameters in the optimizer, and how many of them have ``requires_grad=False``.
    tensors: int = 0
    frozen: int = 0
    # Number of parameters that belong to no observed model; how many of them have a gradient; and
    # how many belonged to a model when the observation began.
    foreign: int = 0
    foreign_with_gradient: int = 0
    replaced: int = 0

    # The largest learning rate of any parameter group: in the newest step, and in any step.
    lr: float = 0.0
    largest_lr: float = 0.0
    # Consecutive steps, up to the newest, with a learning rate of practically 0.
    zero_lr_steps: int = 0
    # Consecutive steps, up to the newest, below a thousandth of the largest learning rate.
    low_lr_steps: int = 0
    weight_decay: float = 0.0
    maximize: bool = False

    # Sampled steps in which any parameter had a gradient.
    with_gradient_steps: int = 0
    # Consecutive sampled steps, up to the newest, in which no parameter had a gradient.
    no_gradient_steps: int = 0
    # Consecutive sampled steps, up to the newest, in which all gradients were exactly 0.
    zero_gradient_steps: int = 0
    # Sampled steps with NaN or Inf in a gradient; the names of some such parameters in the first
    # such step, and the number of that step.
    nonfinite_gradients: int = 0
    nonfinite_names: list[str] = field(default_factory=list)
    first_nonfinite_gradient: int | None = None
    # Sampled steps that changed any weight.
    moved: int = 0

    # Steps in which `AccumulationCheck` saw a backward pass; the three counts below refer to these.
    checked: int = 0
    # Consecutive steps, up to the newest, whose gradients were added to those of the previous step.
    leaks: int = 0
    # Steps whose gradient was reversed, and steps whose gradient was set to zero, between backward
    # and the optimizer step.
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

    # Number of elements of all parameters that are meant to learn.
    weights: int = 0
    # Trainable parameters that are in no optimizer: the names of the first ones, their number,
    # their total number of elements, how many had a gradient, and whether any has changed.
    outside: list[str] = field(default_factory=list)
    outside_count: int = 0
    outside_weights: int = 0
    outside_with_gradient: int = 0
    outside_changed: bool = False
    # Parameters that had no gradient in any sampled step: names, number and elements as above, and
    # whether the model's first trainable parameter is one of them.
    never_gradient: list[str] = field(default_factory=list)
    never_gradient_count: int = 0
    never_gradient_weights: int = 0
    never_gradient_first: bool = False
    # Weights whose rows are all equal.
    symmetric: list[str] = field(default_factory=list)
    # Whether any parameter differs from what it was when the observation began.
    changed: bool = False
    # Running statistics, such as those of batch norm, that hold NaN or Inf.
    nonfinite_buffers: list[str] = field(default_factory=list)
    # The number of sampled steps.
    observed: int = 0
    # Modules that behave differently in training: dropout and batch norm.
    mode_dependent: list[str] = field(default_factory=list)
    # Sampled steps that were made in evaluation mode.
    eval_steps: int = 0
    # All validations, and those made entirely in training mode.
    validations: int = 0
    train_mode_validations: int = 0
    # Whether the first layer normalises the input.
    normalizes_input: bool = False


@dataclass(slots=True, kw_only=True)
class ObservedScheduler:
    """One scheduler: how often it was stepped per optimizer step."""

    kind: str = ""
    optimizer_steps: int = 0
    # How often it was advanced in total, and before the first optimizer step.
    advanced: int = 0
    before_first: int = 0
    # How many optimizer steps had exactly one advance of the scheduler since the previous step, and
    # how many had several.
    advanced_once: int = 0
    advanced_several: int = 0
    # The patience of a ReduceLROnPlateau.
    patience: int | None = None
    # The number of advances to the end of a cycle or to the next milestone.
    period: int | None = None


@dataclass(slots=True, kw_only=True)
class ObservedLayer:
    """One parameter, in the sampled steps of its optimizer."""

    # The number of dimensions of the parameter.
    dims: int = 0
    # Sampled steps, and how many of them had a gradient, and a gradient of exactly 0.
    steps: int = 0
    with_gradient: int = 0
    zero_gradient: int = 0
    nonfinite: bool = False
    # Norm of an update relative to the norm of the parameter: the median, and the largest of the
    # first steps.
    ratio: float | None = None
    largest_ratio: float | None = None
    # Median of the root mean square of the gradient's elements.
    gradient_rms: float | None = None
    first_weight_rms: float | None = None
    last_weight_rms: float | None = None


@dataclass(slots=True, kw_only=True)
class ObservedLoss:
    """One place where a loss is computed."""

    function: str = ""
    # All calls, and how many had their arguments examined.
    calls: int = 0
    examined: int = 0
    # How many examined calls raised a flag, such as "softmax_input"; see `losses.arguments.CHECKS`.
    flags: dict[str, int] = field(default_factory=dict)
    # The shapes that were broadcast, as text.
    shapes: str = ""
    first: float | None = None
    values: list[float] = field(default_factory=list)
    # Loss of the best constant prediction.
    baseline: float | None = None
    # By how much the model's loss on a batch was below that of the constant, newest last.
    gains: list[float] = field(default_factory=list)
    # For each call, 1 or -1: the sign with which the loss enters the minimised objective.
    signs: list[int] = field(default_factory=list)
    labelled_calls: int = 0
    # Number of distinct labels in a batch: the mean, and the number expected if data are shuffled.
    distinct_labels: float | None = None
    expected_labels: float | None = None
    # Mean squared target: the loss of predicting 0.
    target_scale: float | None = None

    def always(self, flag: str) -> bool:
        """Return whether at least 90 % of the examined calls raised a flag, given enough calls."""
        return self.examined >= MIN_CALLS and self.flags.get(flag, 0) >= 0.9 * self.examined

    def mostly(self, flag: str) -> bool:
        """Return whether more than half of the examined calls raised a flag, given enough calls."""
        return self.examined >= MIN_CALLS and self.flags.get(flag, 0) > 0.5 * self.examined


@dataclass(slots=True, kw_only=True)
class ObservedInput:
    """The inputs of one model."""

    # All calls, and how many had their values examined.
    calls: int = 0
    examined: int = 0
    # Examined batches that hold a single value.
    flat: int = 0
    # Batches with NaN or plus infinity.
    nonfinite: int = 0
    # Medians over the examined batches: of the largest magnitude, and of the mean relative to the
    # standard deviation.
    largest: float | None = None
    offset: float | None = None


@dataclass(slots=True, kw_only=True)
class Observations:
    """Everything measured about a run; models, optimizers and so on by name."""

    # The steps of the optimizer that has made the most, and the planned steps of the run.
    steps: int = 0
    total_steps: int | None = None
    ended: bool = False
    objective: str = "minimize"
    # The number of backward passes, in total and since the newest optimizer step.
    backwards: int = 0
    backwards_since_step: int = 0
    # Consecutive sampled steps in which gradients were clipped only before backward computed them.
    early_clips: int = 0
    # Trainable parameters that take part in a forward pass but belong to no model and no optimizer.
    strays: int = 0
    optimizers: dict[str, ObservedOptimizer] = field(default_factory=dict)
    models: dict[str, ObservedModel] = field(default_factory=dict)
    schedulers: dict[str, ObservedScheduler] = field(default_factory=dict)
    layers: dict[str, ObservedLayer] = field(default_factory=dict)
    losses: dict[str, ObservedLoss] = field(default_factory=dict)
    inputs: dict[str, ObservedInput] = field(default_factory=dict)
    # Step, training loss and validation loss of each evaluation.
    validations: list[tuple[int, float | None, float]] = field(default_factory=list)
    # Alignment of a speech synthesiser's attention, see `alignment.alignment_facts`.
    alignment: dict[str, float] | None = None

    @property
    def minimizes_one_loss(self) -> bool:
        """Whether one optimizer minimises one loss, so that its level and sign are meaningful."""
        return self.objective == "minimize" and len(self.optimizers) == 1

    @property
    def had_nonfinite(self) -> bool:
        """Whether a loss or a gradient was not finite."""
        return any(
            optimizer.nonfinite_losses or optimizer.nonfinite_gradients
            for optimizer in self.optimizers.values()
        )
