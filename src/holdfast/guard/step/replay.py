"""Replay a step under a tracer, to find the operation, module and samples that cause NaN or Inf.

A replay runs only after a failed step. It starts from the state at the beginning of that step, and
restores the same state at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from holdfast.guard.parts import Parts
from holdfast.guard.result import Provenance
from holdfast.guard.splitting.window import samples_of, selected
from holdfast.guard.state.work import Work
from holdfast.guard.step.attempts import Attempts
from holdfast.loader.splitting import tensors_in
from holdfast.memory.ladder import StepPlan
from holdfast.memory.oom import clear_exception_frames, find_out_of_memory, release_memory
from holdfast.memory.tensors import versions_of
from holdfast.numerics.bad_samples import find_bad_samples
from holdfast.numerics.eager import eager
from holdfast.numerics.provenance import NeedsOtherRanksError, UntraceableError, find_nan, trace

_FINITE = (
    "a replay of the same step is finite: a race, the hardware, compiled code, or randomness from"
    " outside torch"
)


class Replay:
    """Replays the failed steps of one run."""

    def __init__(self, parts: Parts, attempts: Attempts) -> None:
        self._parts = parts
        self._attempts = attempts

    def find(self, work: Work, plan: StepPlan) -> Provenance:
        """Replay a step that was undone, and return the origin of its NaN or Inf.

        An error in the replay is described in the result, not raised, since training must continue.
        """
        if versions_of(work.tensors) != work.versions:
            return Provenance(
                problem="loss_fn changes its batch in place, so the step cannot be replayed"
            )
        try:
            # The replay runs in eager mode, since torch would otherwise compile code for every
            # batch size that the search tries, and keep it.
            with eager():
                return self._search(work, plan)
        except Exception as error:  # noqa: BLE001 - an error here must not end the run
            failure = error
        out_of_memory = find_out_of_memory(failure)
        why = out_of_memory or f"{type(failure).__name__}: {failure}"[:300]
        clear_exception_frames(failure)
        del failure
        self._attempts.take_back(work)
        if out_of_memory is not None:
            release_memory(self._parts.devices())
        return Provenance(problem=f"the replay failed ({why})")

    def look_at_batch(self, work: Work) -> Provenance:
        """Return where the batch itself contains NaN, for a step that cannot be replayed."""
        return Provenance(origin=find_nan(_batch_tensors(work), work.size))

    def _search(self, work: Work, plan: StepPlan) -> Provenance:
        # Trace the step to find the operation, and then search for the samples.
        stepped_ids = {id(p) for p in work.parameters}
        named = [
            (name, p)
            for name, p in self._parts.named_parameters()
            if p.requires_grad and id(p) in stepped_ids
        ]

        def run_once() -> torch.Tensor:
            self._attempts.restore(work)
            return self._attempts.run(work, plan, drops=False).loss

        try:
            origin = trace(run_once, self._parts.models, named, _batch_tensors(work), work.size)
            if origin is None:
                return Provenance(problem=_FINITE)
            return Provenance(
                origin=origin, samples=self._samples_unless_shared(work, plan, origin.samples)
            )
        except UntraceableError as error:
            return Provenance(problem=str(error))
        finally:
            self._attempts.take_back(work)
            # A replay needs more memory than a step.
            release_memory(self._parts.devices())

    def _samples_unless_shared(
        self, work: Work, plan: StepPlan, hint: Sequence[int]
    ) -> tuple[int, ...]:
        """Return the samples without which the step is finite.

        The result is empty if the search would need the other ranks, which do not replay the step.
        """
        try:
            return self._samples(work, plan, hint)
        except NeedsOtherRanksError as error:
            clear_exception_frames(error)
            return ()

    def _samples(self, work: Work, plan: StepPlan, hint: Sequence[int]) -> tuple[int, ...]:
        """Return the indices of the samples without which the step is finite.

        The result is empty if the samples of the batch cannot be selected one by one.

        Args:
            work: The input of the step.
            plan: The plan of the attempt.
            hint: Indices of samples that are probably bad, which are tried first.
        """
        if work.size is None or callable(work.split):
            return ()
        size = samples_of(work.batch, work.split)
        if size < 2:
            return ()
        smallest = self._attempts.safety.smallest_part()

        def is_bad(chosen: Sequence[int]) -> bool:
            indices = list(chosen)
            if len(indices) < smallest:
                # BatchNorm needs at least two samples, so repeat a single one.
                indices *= math.ceil(smallest / len(indices))
            part = replace(work, batch=selected(work.batch, indices, work.split), size=len(indices))
            self._attempts.restore(work)
            loss = self._attempts.run(part, plan, drops=False).loss
            gradients = [p.grad for p in work.parameters if p.grad is not None]
            return not bool(torch.isfinite(loss)) or not all(
                bool(_finite(gradient)) for gradient in gradients
            )

        return tuple(find_bad_samples(is_bad, size, hint))

    def without_samples(self, work: Work, provenance: Provenance | None) -> Any | None:
        """Return the batch of a step without its bad samples, or None if they cannot be removed."""
        if (
            provenance is None
            or not provenance.samples
            or work.size is None
            or callable(work.split)
        ):
            return None
        bad = set(provenance.samples)
        kept = [index for index in range(samples_of(work.batch, work.split)) if index not in bad]
        if len(kept) < self._attempts.safety.smallest_part():
            return None
        return selected(work.batch, kept, work.split)


def _batch_tensors(work: Work) -> list[tuple[str, torch.Tensor]]:
    return [
        (f"batch tensor {number}", tensor) for number, tensor in enumerate(tensors_in(work.batch))
    ]


def _finite(gradient: torch.Tensor) -> torch.Tensor:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return torch.isfinite(values).all()
