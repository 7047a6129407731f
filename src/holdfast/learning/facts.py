"""What is known about a run: plain counters and small histories.

Observers fill them in, rules read them.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class OptimizerFacts:
    """One optimizer: its settings, its steps, and what its gradients were like."""

    kind: str = ""
    steps: int = 0
    observed: int = 0
    closure: bool = False  # the loss is computed within a step
    losses: list[tuple[int, float]] = field(default_factory=list)  # step and loss, thinned
    nonfinite_losses: int = 0
    first_nonfinite_loss: int | None = None
    gradient_norms: list[float] = field(default_factory=list)

    tensors: int = 0
    frozen: int = 0
    foreign: int = 0  # tensors that no watched model has
    foreign_with_gradient: int = 0
    replaced: int = 0  # of the foreign ones, those that a model had at first

    lr: float = 0.0
    largest_lr: float = 0.0
    zero_lr_steps: int = 0  # in a row, until now
    low_lr_steps: int = 0
    weight_decay: float = 0.0
    maximize: bool = False

    with_gradient_steps: int = 0
    no_gradient_steps: int = 0  # in a row, until now
    zero_gradient_steps: int = 0
    nonfinite_gradients: int = 0
    nonfinite_names: list[str] = field(default_factory=list)
    first_nonfinite_gradient: int | None = None
    nonfinite_state: list[str] = field(default_factory=list)
    moved: int = 0  # observed steps that changed a weight

    clipped_steps: int = 0  # that the guard has clipped
    clipped_to: float = 0.0
    committed_steps: int = 0
    leaks: int = 0  # steps in a row to whose gradients those of the step before were added
    checked: int = 0  # steps in which gradients were seen to arrive
    reversed: int = 0  # steps whose gradient was turned round after backward
    zeroed: int = 0
    scaled: float | None = None  # usual factor by which a gradient was scaled after backward
    scaled_share: float = 0.0  # steps in which it was


@dataclass(slots=True, kw_only=True)
class ModelFacts:
    """One model: which weights learn, and in which mode it was."""

    weights: int = 0
    # Trainable parameters in no optimizer, the first
    outside: list[str] = field(default_factory=list)
    outside_count: int = 0
    outside_weights: int = 0
    outside_with_gradient: int = 0
    # Matrices among them that are as an initialiser draws them; 0 if one is not
    outside_drawn: int = 0
    outside_changed: bool = False
    # The first without a gradient in 10 steps
    never_gradient: list[str] = field(default_factory=list)
    never_gradient_count: int = 0
    never_gradient_weights: int = 0
    never_gradient_first: bool = False
    # Frozen matrices, nearly all, as an initialiser draws them
    still_drawn: list[str] = field(default_factory=list)
    symmetric: list[str] = field(default_factory=list)  # weights whose rows are all equal
    changed: bool = False
    nonfinite_buffers: list[str] = field(default_factory=list)
    observed: int = 0
    eval_steps: int = 0
    validations: int = 0
    train_mode_validations: int = 0
    modal: list[str] = field(default_factory=list)  # modules that behave differently in training
    dropout: float = 0.0
    batch_norm: bool = False
    normalised_input: bool = False


@dataclass(slots=True, kw_only=True)
class SchedulerFacts:
    """One scheduler: how often it was advanced for each step of its optimizer."""

    kind: str = ""
    optimizer_steps: int = 0
    advanced: int = 0
    before_first: int = 0
    every_step: int = 0
    several: int = 0
    patience: int | None = None
    period: int | None = None


@dataclass(slots=True, kw_only=True)
class LayerFacts:
    """One parameter, in the observed steps of its optimizer."""

    elements: int = 0
    dims: int = 0
    steps: int = 0
    with_gradient: int = 0
    zero_gradient: int = 0
    compared: int = 0  # with a gradient, and the weights looked at before and after
    unmoved: int = 0  # of these, no sampled element changed
    nonfinite: bool = False
    ratio: float | None = None  # usual length of a step relative to the length of the parameter
    largest_ratio: float | None = None  # in the first steps
    gradient_rms: float | None = None  # usual root mean square of the gradient's elements
    first_weight_rms: float | None = None
    last_weight_rms: float | None = None


@dataclass(slots=True, kw_only=True)
class LossFacts:
    """One place where a loss is computed."""

    function: str = ""
    calls: int = 0
    examined: int = 0  # calls whose arguments were looked at
    # Of these, in which something was so: "softmax_input"
    flags: dict[str, int] = field(default_factory=dict)
    shapes: str = ""  # that were broadcast
    first: float | None = None
    values: list[float] = field(default_factory=list)
    baseline: float | None = None  # loss of the best constant prediction
    # The loss of that constant on a batch, less that of the model
    gains: list[float] = field(default_factory=list)
    signs: list[int] = field(default_factory=list)  # with which it enters the whole: 1 or -1
    labelled_calls: int = 0
    distinct_labels: float | None = None  # in a batch
    expected_labels: float | None = None  # in a batch that is drawn at random
    constant_target: float | None = None
    target_scale: float | None = None  # loss of predicting 0
    target_sizes: list[float] = field(default_factory=list)

    def always(self, flag: str, fewest: int = 3) -> bool:
        """Return whether a flag was seen in practically all calls, and those were enough.

        Catalogue 38.
        """
        return self.examined >= fewest and self.flags.get(flag, 0) >= 0.9 * self.examined

    def mostly(self, flag: str) -> bool:
        """Return whether a flag was seen in more than half of enough calls."""
        return self.examined >= 3 and self.flags.get(flag, 0) > 0.5 * self.examined


@dataclass(slots=True, kw_only=True)
class InputFacts:
    """What one model was given and gave back."""

    calls: int = 0
    batch: int = 0
    largest_batch: int = 0
    fingerprints: int = 0  # batches that were recognised by their contents
    different: int = 0
    longest_repeat: int = 0
    examined: int = 0  # calls whose values were looked at
    constant: int = 0  # of these, batches without difference between samples
    flat: int = 0  # batches that hold one value only
    nonfinite: int = 0
    largest: float | None = None  # usual largest magnitude
    offset: float | None = None  # usual mean relative to the spread
    answers: int = 0
    same_answers: int = 0


@dataclass(slots=True, kw_only=True)
class Facts:
    """Everything that is known about a run; parts by name."""

    steps: int = 0
    total_steps: int | None = None
    ended: bool = False
    objective: str = "minimize"
    backwards: int = 0
    backwards_since_step: int = 0
    # Steps in a row in which gradients were clipped before backward, and not after
    early_clips: int = 0
    # A copy of the model is computed with in each step, and its weights change
    followed: bool = False
    strays: int = 0  # trainable parameters that a model computes with and does not own
    optimizers: dict[str, OptimizerFacts] = field(default_factory=dict)
    models: dict[str, ModelFacts] = field(default_factory=dict)
    schedulers: dict[str, SchedulerFacts] = field(default_factory=dict)
    layers: dict[str, LayerFacts] = field(default_factory=dict)
    losses: dict[str, LossFacts] = field(default_factory=dict)
    inputs: dict[str, InputFacts] = field(default_factory=dict)
    # Shares in windows of steps, by rectifier
    dead_units: dict[str, list[float]] = field(default_factory=dict)
    # Usual share at the bounds, by tanh or sigmoid
    saturated: dict[str, float] = field(default_factory=dict)
    # Step, training loss, loss
    validations: list[tuple[int, float | None, float]] = field(default_factory=list)
    alignment: dict[str, float] | None = None  # of a speech synthesiser's attention

    @property
    def minimizes_one_loss(self) -> bool:
        """Whether one optimizer makes one loss small, so that the loss's level and sign mean
        something.
        """
        return self.objective == "minimize" and len(self.optimizers) == 1

    @property
    def broken(self) -> bool:
        """Whether a loss or a gradient was not finite."""
        return any(
            each.nonfinite_losses or each.nonfinite_gradients for each in self.optimizers.values()
        )
