"""Decide what to try next when memory runs out, and when to try larger micro-batches again.

After an out-of-memory error, the remedies are tried in this order:

1. **Retry** the same attempt after releasing memory (bit-exact).
2. **Recompute** the activations of the modules that save the most memory for the backward pass, and
   of more modules after each further failure, for as long as that helps (bit-exact on CPUs).
3. **Split**: halve the micro-batch (equal up to rounding).
4. **Stop** (H401).

After ``grow_after_steps`` clean steps, the micro-batch size is doubled. Once a micro-batch is the
whole batch, recomputation is switched off. Each larger plan is first tried for one step. If that
step runs out of memory, the ladder returns to the previous plan and doubles the wait before the
next trial, up to 64 times the initial wait. Failed trials therefore stay rare. The ladder's state
is saved in every checkpoint.

This module only makes decisions. It never touches the device or the batch, and it frees no memory.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from holdfast.core.containers import check_count, check_number
from holdfast.core.events.data import Promise
from holdfast.core.events.decisions import Decision, Grow, Recompute, Retry, Split, Stop
from holdfast.core.policy.policy import Policy
from holdfast.core.text import counted

_LONGEST_WAIT_FACTOR = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """How to run an attempt at a step: the micro-batch size, and the modules to recompute."""

    # The largest number of samples in one forward/backward pass; None means the whole batch.
    micro_batch_size: int | None = None
    # Names of the modules whose activations are recomputed.
    recompute: tuple[str, ...] = ()

    def samples(self, batch_size: int) -> int:
        """Return how many samples of a batch the largest forward/backward pass processes."""
        if self.micro_batch_size is None:
            return batch_size
        return min(self.micro_batch_size, batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedies:
    """The remedies that are possible for a step that ran out of memory."""

    # The names of the modules to recompute in the next attempt. If recomputing more modules would
    # not help, they are the same as in the last attempt.
    recompute: tuple[str, ...] = ()
    # Why the batch must not be split, or None if splitting is allowed.
    no_split: str | None = None
    # How close the result stays to that of a normal step if this batch is split.
    split_promise: Promise = "equal up to rounding"
    # How close the result stays to that of a normal step if this device recomputes activations.
    recompute_promise: Promise = "bit-exact"
    # The smallest number of samples in one forward/backward pass.
    smallest: int = 1


class MemoryLadder:
    """Decides which plan to use after each out-of-memory error and each clean step.

    Args:
        largest: The largest micro-batch that the policy allows, or None for the whole batch.
        grow_after_steps: How many clean steps to wait before trying a larger plan.
        start: The micro-batch size to begin with, or None for `largest`.
        recompute: Names of modules that are always recomputed.
    """

    def __init__(
        self,
        *,
        largest: int | None,
        grow_after_steps: int,
        start: int | None = None,
        recompute: tuple[str, ...] = (),
    ) -> None:
        self._largest = largest
        self._grow_after_steps = grow_after_steps
        self._always_recompute = recompute
        self.plan = StepPlan(
            micro_batch_size=largest if start is None else start, recompute=recompute
        )
        # While a larger plan is on trial, the previous plan, which is known to fit.
        self._fallback: StepPlan | None = None
        self._clean_steps = 0
        self._wait = grow_after_steps
        # Number of samples in the largest batch that ran out of memory.
        self._tight_batch = 0
        # The remedies after the last failure. Their promises also apply when the plan grows again.
        self._remedies = Remedies()

    @classmethod
    def of(cls, policy: Policy) -> MemoryLadder:
        """Return a ladder configured by a policy."""
        requested = policy.micro_batch_size
        return cls(
            largest=requested if isinstance(requested, int) else None,
            grow_after_steps=policy.grow_after_steps,
            start=policy.forecast_micro_batch_size,
            recompute=policy.recompute if isinstance(policy.recompute, tuple) else (),
        )

    @property
    def on_trial(self) -> bool:
        """Whether the current plan is a larger plan that is still being tried out."""
        return self._fallback is not None

    @property
    def is_at_rest(self) -> bool:
        """Whether the current plan is the largest one, which committed steps do not change."""
        return self._fallback is None and self._is_largest(self.plan)

    def decide_after_oom(self, *, batch_size: int, failures: int, remedies: Remedies) -> Decision:
        """Decide what to do after an attempt ran out of memory, and update the plan.

        Args:
            batch_size: Number of samples in the batch.
            failures: How many attempts at this step have run out of memory, including this one.
            remedies: The remedies that are possible for this step.
        """
        self._clean_steps = 0
        self._remedies = remedies
        self._tight_batch = max(self._tight_batch, batch_size)
        if self._fallback is not None:
            return self._end_trial(batch_size, self._fallback)
        if failures == 1:
            return Retry(reason="freed the memory of the failed attempt", promise="bit-exact")
        if self.can_recompute_more(remedies.recompute):
            return self._recompute_more()
        return self._split_or_stop(batch_size)

    def can_recompute_more(self, modules: tuple[str, ...]) -> bool:
        """Return whether recomputing these modules is a remedy, which comes before a split.

        Args:
            modules: The names of the modules to recompute in the next attempt.
        """
        return not self.on_trial and set(modules) > set(self.plan.recompute)

    def _end_trial(self, batch_size: int, fallback: StepPlan) -> Decision:
        self.plan = fallback
        self._fallback = None
        self._wait = min(2 * self._wait, _LONGEST_WAIT_FACTOR * self._grow_after_steps)
        if fallback.samples(batch_size) < batch_size and self._remedies.no_split is not None:
            return self._refuse_split()
        return self._as_decision("the larger plan on trial does not fit", batch_size)

    def _recompute_more(self) -> Decision:
        self.plan = replace(self.plan, recompute=self._remedies.recompute)
        return Recompute(
            reason="these modules save the most memory for the backward pass",
            promise=self._remedies.recompute_promise,
            modules=self.plan.recompute,
        )

    def _split_or_stop(self, batch_size: int) -> Decision:
        samples = self.plan.samples(batch_size)
        if samples <= self._remedies.smallest:
            return Stop(
                reason=f"micro-batches of {counted(samples, 'sample')} do not fit",
                promise="bit-exact",
            )
        if self._remedies.no_split is not None:
            return self._refuse_split()
        half = (samples + 1) // 2
        self.plan = replace(self.plan, micro_batch_size=max(self._remedies.smallest, half))
        reason = f"micro-batches of {counted(samples, 'sample')} do not fit"
        return self._as_decision(reason, batch_size)

    def _refuse_split(self) -> Decision:
        reason = f"the batch must not be split: {self._remedies.no_split}"
        return Stop(reason=reason, promise="bit-exact")

    def adopt(self, plan: StepPlan) -> None:
        """Use a plan that all ranks have agreed on."""
        self.plan = plan

    def without_split(self) -> None:
        """Return to whole batches, because it turned out that batches cannot be split."""
        self.plan = replace(self.plan, micro_batch_size=None)
        self._fallback = None

    def without_recompute(self) -> None:
        """Stop recomputing, because it turned out that the modules cannot be recomputed."""
        self.plan = replace(self.plan, recompute=())
        self._always_recompute = ()
        self._fallback = None

    def decide_after_step(self, *, batch_size: int, attempts: int) -> Decision | None:
        """Decide after a committed step whether to try a larger plan in the next step.

        Args:
            batch_size: Number of samples in the batch of the committed step.
            attempts: How many attempts the step took.

        Returns:
            The decision to try a larger plan, or None to keep the current plan.
        """
        if self._fallback is not None:
            if batch_size < self._tight_batch:
                # Success with a small batch, such as the last one of an epoch, does not show that
                # the plan fits the largest batch. Continue the trial.
                return None
            self._fallback = None
            self._wait = self._grow_after_steps
        if attempts > 1:
            self._clean_steps = 0
            return None
        self._clean_steps += 1
        if self._clean_steps < self._wait or self._is_largest(self.plan):
            return None
        larger = self._larger_plan(max(batch_size, self._tight_batch))
        if larger == self.plan:
            return None
        return self._begin_trial(larger)

    def _begin_trial(self, larger: StepPlan) -> Decision:
        smaller = self.plan
        self._fallback = smaller
        self.plan = larger
        self._clean_steps = 0
        reason = f"{self._wait} clean steps"
        if larger.recompute != smaller.recompute:
            promise = self._remedies.recompute_promise
            return Recompute(reason=reason, promise=promise, modules=())
        return Grow(
            reason=reason,
            promise=self._remedies.split_promise,
            micro_batch_size=larger.micro_batch_size,
        )

    def _is_largest(self, plan: StepPlan) -> bool:
        return plan.micro_batch_size == self._largest and plan.recompute == self._always_recompute

    def _larger_plan(self, batch_size: int) -> StepPlan:
        size = self.plan.micro_batch_size
        if size is None or size == self._largest:
            return replace(self.plan, recompute=self._always_recompute)
        doubled = 2 * size
        if self._largest is not None:
            return replace(self.plan, micro_batch_size=min(doubled, self._largest))
        return replace(self.plan, micro_batch_size=doubled if doubled < batch_size else None)

    def _as_decision(self, reason: str, batch_size: int) -> Decision:
        """Return the current plan as a decision: a split of a batch of this size, or recompute."""
        samples = self.plan.samples(batch_size)
        if samples < batch_size:
            promise = self._remedies.split_promise
            return Split(reason=reason, promise=promise, micro_batch_size=samples)
        return Recompute(
            reason=reason,
            promise=self._remedies.recompute_promise,
            modules=self.plan.recompute,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the ladder's state as JSON-serializable values."""
        return {
            "plan": asdict(self.plan),
            "fallback": None if self._fallback is None else asdict(self._fallback),
            "clean_steps": self._clean_steps,
            "wait": self._wait,
            "tight_batch": self._tight_batch,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state, but never exceed the limits of the current policy."""
        self.plan = self._plan_from(state["plan"])
        self._fallback = None
        if state["fallback"] is not None:
            self._fallback = self._plan_from(state["fallback"])
        self._clean_steps = check_count(state["clean_steps"])
        self._wait = max(check_count(state["wait"]), self._grow_after_steps)
        self._tight_batch = check_number(state["tight_batch"], or_none=True)

    def _plan_from(self, state: dict[str, Any]) -> StepPlan:
        size = state["micro_batch_size"]
        if size is not None:
            size = check_count(size, least=1, below=2**31)
        if self._largest is not None:
            size = self._largest if size is None else min(size, self._largest)
        return StepPlan(micro_batch_size=size, recompute=tuple(state["recompute"]))
