"""What to try next when memory is short, and when to ask for more again.

    out of memory  retry the same (bit-exact) → recompute activations, more as long as that saves
                   (bit-exact on CPU) → halve the micro-batch (equal up to rounding) → stop
    clean steps    after `grow_after_steps` of them: double the micro-batch, at last switch
                   recompute off

A larger size is a trial for one step: if it fails, the old one comes back at once and the wait
doubles, up to 64 times, so it never thrashes. The state is part of every checkpoint.

Does not: touch the device, free anything, or know what a batch is.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from holdfast.core.containers import count, number
from holdfast.core.events.event import Decision, Grow, Promise, Recompute, Retry, Split, Stop
from holdfast.core.policy.policy import Policy

_LONGEST_WAIT_FACTOR = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How an attempt runs."""

    # Most samples in one forward/backward; None is the whole batch
    micro_batch_size: int | None = None
    recompute: tuple[str, ...] = ()  # names of the modules whose activations are recomputed

    def samples(self, batch_size: int) -> int:
        """Return the samples in one forward/backward of a batch of this size."""
        return (
            batch_size if self.micro_batch_size is None else min(self.micro_batch_size, batch_size)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedies:
    """What a step may do about a lack of memory."""

    # Modules for the next attempt; those of the last one if no others help
    recompute: tuple[str, ...] = ()
    no_split: str | None = None  # why the batch may not be split, or None if it may
    split_promise: Promise = "equal up to rounding"  # what splitting this batch promises
    recompute_promise: Promise = "bit-exact"  # what recomputing promises on this device
    smallest: int = 1  # fewest samples that one forward/backward can take


class MemoryLadder:
    """Decide after each out-of-memory error and each clean step."""

    def __init__(
        self,
        *,
        # Most samples per forward/backward that the policy allows; None is the whole batch
        largest: int | None,
        grow_after_steps: int,
        # Samples per forward/backward to begin with; None is as many as are allowed
        start: int | None = None,
        # Modules that are recomputed from the first step on, for good
        recompute: tuple[str, ...] = (),
    ) -> None:
        self._largest = largest
        self._grow_after_steps = grow_after_steps
        self._always_recompute = recompute
        self.plan = Plan(micro_batch_size=largest if start is None else start, recompute=recompute)
        # The plan that is known to fit, while a larger one is tried
        self._fallback: Plan | None = None
        self._clean_steps = 0
        self._wait = grow_after_steps
        self._tight_batch = 0  # samples of the largest batch that ran out of memory
        # Of the last failure: what was promised then holds for the way back too
        self._remedies = Remedies()

    @classmethod
    def of(cls, policy: Policy) -> MemoryLadder:
        """Return the ladder that a policy asks for."""
        asked = policy.micro_batch_size
        return cls(
            largest=asked if isinstance(asked, int) else None,
            grow_after_steps=policy.grow_after_steps,
            start=policy.forecast_micro_batch_size,
            recompute=policy.recompute if isinstance(policy.recompute, tuple) else (),
        )

    @property
    def on_trial(self) -> bool:
        """Return whether the plan is a larger one that is tried for one step."""
        return self._fallback is not None

    def decide_after_oom(self, *, batch_size: int, failures: int, remedies: Remedies) -> Decision:
        """Return what to do about the last of so many attempts that ran out of memory, and make
        it the plan.
        """
        self._clean_steps = 0
        self._remedies = remedies
        self._tight_batch = max(self._tight_batch, batch_size)
        if self._fallback is not None:
            self.plan, self._fallback = self._fallback, None
            self._wait = min(2 * self._wait, _LONGEST_WAIT_FACTOR * self._grow_after_steps)
            return self._as_decision(
                "the larger plan that was tried does not fit", batch_size, remedies
            )
        if failures == 1:
            return Retry(reason="freed what the failed attempt held", promise="bit-exact")
        if set(remedies.recompute) > set(self.plan.recompute):
            self.plan = replace(self.plan, recompute=remedies.recompute)
            reason = "these modules keep most bytes for the backward pass"
            return Recompute(
                reason=reason, promise=remedies.recompute_promise, modules=remedies.recompute
            )
        samples = self.plan.samples(batch_size)
        if samples <= remedies.smallest:
            return Stop(reason=f"{samples} sample(s) at a time do not fit", promise="bit-exact")
        if remedies.no_split is not None:
            return Stop(reason=f"may not split: {remedies.no_split}", promise="bit-exact")
        self.plan = replace(self.plan, micro_batch_size=max(remedies.smallest, -(-samples // 2)))
        return self._as_decision(f"{samples} samples at a time do not fit", batch_size, remedies)

    def without_split(self) -> None:
        """Note that batches may not be cut after all."""
        self.plan = replace(self.plan, micro_batch_size=None)
        self._fallback = None

    def without_recompute(self) -> None:
        """Note that recomputation does not work for the modules of the plan."""
        self.plan = replace(self.plan, recompute=())
        self._always_recompute = ()
        self._fallback = None

    def decide_after_step(self, *, batch_size: int, attempts: int) -> Decision | None:
        """Return a larger plan to try from the next step on, or None."""
        if self._fallback is not None:
            if batch_size < self._tight_batch:
                return None  # a short batch, such as the last of an epoch, proves nothing
            self._fallback, self._wait = None, self._grow_after_steps
        if attempts > 1:
            self._clean_steps = 0
            return None
        self._clean_steps += 1
        is_largest = (
            self.plan.micro_batch_size == self._largest
            and self.plan.recompute == self._always_recompute
        )
        if self._clean_steps < self._wait or is_largest:
            return None
        larger = self._larger(max(batch_size, self._tight_batch))
        if larger == self.plan:
            return None
        self._fallback, self.plan, self._clean_steps = self.plan, larger, 0
        reason = f"{self._wait} clean steps"
        if larger.recompute != self._fallback.recompute:
            return Recompute(reason=reason, promise=self._remedies.recompute_promise, modules=())
        return Grow(
            reason=reason,
            promise=self._remedies.split_promise,
            micro_batch_size=larger.micro_batch_size,
        )

    def _larger(self, batch_size: int) -> Plan:
        size = self.plan.micro_batch_size
        if size is None or size == self._largest:
            return replace(self.plan, recompute=self._always_recompute)
        if self._largest is not None:
            return replace(self.plan, micro_batch_size=min(2 * size, self._largest))
        return replace(self.plan, micro_batch_size=None if 2 * size >= batch_size else 2 * size)

    def _as_decision(self, reason: str, batch_size: int, remedies: Remedies) -> Decision:
        samples = self.plan.samples(batch_size)
        if samples < batch_size:
            return Split(reason=reason, promise=remedies.split_promise, micro_batch_size=samples)
        return Recompute(
            reason=reason, promise=remedies.recompute_promise, modules=self.plan.recompute
        )

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
        self.plan = self._plan_of(state["plan"])
        self._fallback = None if state["fallback"] is None else self._plan_of(state["fallback"])
        self._clean_steps = count(state["clean_steps"])
        self._wait = max(count(state["wait"]), self._grow_after_steps)
        self._tight_batch = number(state["tight_batch"], or_none=True)

    def _plan_of(self, state: dict[str, Any]) -> Plan:
        size = (
            None
            if state["micro_batch_size"] is None
            else count(state["micro_batch_size"], least=1, below=2**31)
        )
        if self._largest is not None:
            size = self._largest if size is None else min(size, self._largest)
        return Plan(micro_batch_size=size, recompute=tuple(state["recompute"]))
