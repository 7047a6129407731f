"""What to try next when memory is short, and when to ask for more again.

    out of memory      retry the same (bit-exact) → recompute activations (bit-exact on CPU) → halve the
                       micro-batch (equal up to rounding) → stop
    clean steps        after `grow_after_steps` of them: double the micro-batch, at last switch recompute off

A larger size is a trial for one step: if it fails, the old one comes back at once and the wait doubles, up to 64
times, so it never thrashes. The state is part of every checkpoint.

Does not: touch the device, free anything, or know what a batch is.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from holdfast.core.events import Decision, Grow, Promise, Recompute, Retry, Split, Stop

_LONGEST_WAIT_FACTOR = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How an attempt runs.

    Args:
        micro_batch_size: Most samples in one forward/backward; None is the whole batch.
        recompute: Whether activation checkpointing is on.
    """

    micro_batch_size: int | None = None
    recompute: bool = False

    def samples(self, batch_size: int) -> int:
        """Return the samples in one forward/backward of a batch of this size."""
        return batch_size if self.micro_batch_size is None else min(self.micro_batch_size, batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What a step may do about a lack of memory.

    Args:
        blocks: Modules that can be recomputed; empty if there are none or it is switched off.
        no_split: Why the batch may not be split, or None if it may.
        split_promise: What splitting this batch promises.
        recompute_promise: What recomputing promises on this device.
        smallest: Fewest samples that one forward/backward can take.
    """

    blocks: tuple[str, ...] = ()
    no_split: str | None = None
    split_promise: Promise = "equal up to rounding"
    recompute_promise: Promise = "bit-exact"
    smallest: int = 1


class MemoryLadder:
    """Decide after each out-of-memory error and each clean step.

    Args:
        largest: Most samples per forward/backward that the policy allows; None is the whole batch.
        grow_after_steps: Clean steps before a larger micro-batch is tried.
    """

    def __init__(self, *, largest: int | None, grow_after_steps: int) -> None:
        self._largest = largest
        self._grow_after_steps = grow_after_steps
        self.plan = Plan(micro_batch_size=largest)
        self._fallback: Plan | None = None  # the plan that is known to fit, while a larger one is tried
        self._clean_steps = 0
        self._wait = grow_after_steps
        self._tight_batch = 0  # samples of the largest batch that ran out of memory
        self._means = Means()  # of the last failure: what was promised then holds for the way back too

    @property
    def on_trial(self) -> bool:
        """Return whether the plan is a larger one that is tried for one step."""
        return self._fallback is not None

    def decide_after_oom(self, *, batch_size: int, failures: int, means: Means) -> Decision:
        """Return what to do about an attempt that ran out of memory, and make it the plan.

        Args:
            batch_size: Samples in the batch.
            failures: Attempts of this step that ran out of memory so far, this one included.
            means: What is possible.
        """
        self._clean_steps = 0
        self._means = means
        self._tight_batch = max(self._tight_batch, batch_size)
        if self._fallback is not None:
            self.plan, self._fallback = self._fallback, None
            self._wait = min(2 * self._wait, _LONGEST_WAIT_FACTOR * self._grow_after_steps)
            return self._as_decision("the larger plan that was tried does not fit", batch_size, means)
        if failures == 1:
            return Retry(reason="freed what the failed attempt held", promise="bit-exact")
        if means.blocks and not self.plan.recompute:
            self.plan = replace(self.plan, recompute=True)
            return self._as_decision("the retry ran out of memory too", batch_size, means)
        samples = self.plan.samples(batch_size)
        if samples <= means.smallest:
            return Stop(reason=f"{samples} sample(s) at a time do not fit", promise="bit-exact")
        if means.no_split is not None:
            return Stop(reason=f"may not split: {means.no_split}", promise="bit-exact")
        smaller = max(means.smallest, -(-samples // 2))
        self.plan = replace(self.plan, micro_batch_size=smaller)
        return self._as_decision(f"{samples} samples at a time do not fit", batch_size, means)

    def without_split(self) -> None:
        """Note that batches may not be cut after all."""
        self.plan = replace(self.plan, micro_batch_size=None)
        self._fallback = None

    def without_recompute(self) -> None:
        """Note that recomputation does not work for this model."""
        self.plan = replace(self.plan, recompute=False)
        self._fallback = None

    def decide_after_step(self, *, batch_size: int, attempts: int) -> Decision | None:
        """Return a larger plan to try from the next step on, or None.

        Args:
            batch_size: Samples in the batch that was just committed.
            attempts: Attempts that it took.
        """
        if self._fallback is not None:
            if batch_size < self._tight_batch:
                return None  # a short batch, such as the last of an epoch, proves nothing
            self._fallback, self._wait = None, self._grow_after_steps
        if attempts > 1:
            self._clean_steps = 0
            return None
        self._clean_steps += 1
        larger = self._larger(max(batch_size, self._tight_batch))
        if self._clean_steps < self._wait or larger == self.plan:
            return None
        self._fallback, self.plan, self._clean_steps = self.plan, larger, 0
        reason = f"{self._wait} clean steps"
        if larger.recompute != self._fallback.recompute:
            return Recompute(reason=reason, promise=self._means.recompute_promise, modules=())
        return Grow(reason=reason, promise=self._means.split_promise, micro_batch_size=larger.micro_batch_size)

    def _larger(self, batch_size: int) -> Plan:
        size = self.plan.micro_batch_size
        if size is None or size == self._largest:
            return replace(self.plan, recompute=False)
        doubled: int | None = 2 * size
        if self._largest is not None:
            doubled = min(2 * size, self._largest)
        elif 2 * size >= batch_size:
            doubled = None
        return replace(self.plan, micro_batch_size=doubled)

    def _as_decision(self, reason: str, batch_size: int, means: Means) -> Decision:
        samples = self.plan.samples(batch_size)
        if samples < batch_size:
            return Split(reason=reason, promise=means.split_promise, micro_batch_size=samples)
        modules = means.blocks if self.plan.recompute else ()
        return Recompute(reason=reason, promise=means.recompute_promise, modules=modules)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "plan": asdict(self.plan),
            "fallback": None if self._fallback is None else asdict(self._fallback),
            "clean_steps": self._clean_steps,
            "wait": self._wait,
            "tight_batch": self._tight_batch,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`; a limit that the policy has lowered since then is kept."""
        self.plan = self._within_limit(Plan(**state["plan"]))
        fallback = state["fallback"]
        self._fallback = None if fallback is None else self._within_limit(Plan(**fallback))
        self._clean_steps = state["clean_steps"]
        self._wait = max(state["wait"], self._grow_after_steps)
        self._tight_batch = state["tight_batch"]

    def _within_limit(self, plan: Plan) -> Plan:
        if self._largest is None or (plan.micro_batch_size or self._largest + 1) <= self._largest:
            return plan
        return replace(plan, micro_batch_size=self._largest)
