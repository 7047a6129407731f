"""`Guard`: the user's own loop, made to hold.

    batches()   where the run continues, when it saves, and where it stops
    step()      one transaction, and what is done about NaN, Inf and a torn optimizer step
    evaluate()  evaluation that leaves no trace in training and can be interrupted

The loop is at a *boundary* when the body for one batch is finished: only there is everything that belongs to a
batch done, also what the caller does after ``step``. Checkpoints are taken at boundaries.
"""

from __future__ import annotations

import difflib
import math
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch

from holdfast.core.clock import Clock, SystemClock
from holdfast.core.errors import LoaderError, NonFiniteError, OutOfMemoryError, PolicyError
from holdfast.core.events import Event, RollBack, Stop
from holdfast.core.policy import Policy
from holdfast.core.version import __version__
from holdfast.data.random_state import RandomState, capture, restore
from holdfast.data.splitting import Split
from holdfast.memory.host_allocator import set_malloc_threshold
from holdfast.memory.ladder import MemoryLadder
from holdfast.numerics.nonfinite import decide_after_nonfinite, describe_nonfinite
from holdfast.recorder.black_box import StepMark
from holdfast.run.cursor import Cursor
from holdfast.run.directory import RunDirectory
from holdfast.run.parts import advances_alone, gather_parts
from holdfast.run.promises import LossFunction
from holdfast.run.ranks import find_ranks
from holdfast.run.result import Counters, Statistics, StepResult
from holdfast.run.session import Session, random_state_of
from holdfast.run.stop import Interrupted, StopRequest
from holdfast.run.transaction import Outcome, TornStep, Transaction


class Guard:
    """Keeps one training run alive, correct and inside its memory.

    Making a guard takes the lock of the run directory and, if there is a good checkpoint in it, puts all state
    back into the given objects. It is released by `close`, by the end of `batches`, or as a context manager.

    Args:
        run_dir: Directory of the run, made if missing.
        model: One module, or a dict of named ones.
        optimizer: One optimizer, or a dict of named ones. All their parameters belong to the models.
        scheduler: Learning-rate scheduler(s), by optimizer name where there are several. Advanced by the guard as
            ``Policy.scheduler_interval`` says; ReduceLROnPlateau is saved only, since it needs your metric.
        loader: What `batches` iterates: a `holdfast.DataLoader`, or any other iterable of batches.
        state: Further state by name, such as an average of the weights: anything with ``state_dict`` and
            ``load_state_dict``.
        policy: Settings: a `Policy`, the path of a YAML file, or None for defaults and ``HOLDFAST_*`` variables.
        split: Where the batch dimension is (see ``data.splitting``): a number, a prefix of the batch's structure,
            or a function of batch and micro-batch size.
        clock: Time, for tests.
        **overrides: Policy fields by name, stronger than `policy`; for instance ``precision="bf16"``.

    Raises:
        PolicyError: H1xx, for an argument that cannot be used.
        RunDirectoryError: H30x, if the directory is locked, not writable, newer, or of another model.
        CheckpointError: H31x, if no checkpoint verifies, or the newest does not fit these objects.

    Example:
        >>> import tempfile, torch, holdfast
        >>> model = torch.nn.Linear(2, 1)
        >>> data = [torch.randn(8, 2) for _ in range(3)]
        >>> guard = holdfast.Guard(tempfile.mkdtemp(), model=model, loader=data,
        ...                        optimizer=torch.optim.AdamW(model.parameters()))
        >>> for batch in guard.batches(max_epochs=2):
        ...     result = guard.step(batch, lambda x: model(x).square().mean())
        >>> guard.global_step
        6
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        model: torch.nn.Module | Mapping[str, torch.nn.Module],
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
        scheduler: Any = None,
        loader: Iterable[Any] | None = None,
        state: Any = None,
        policy: Policy | str | os.PathLike[str] | None = None,
        split: Split = 0,
        clock: Clock | None = None,
        **overrides: Any,
    ) -> None:
        self.policy = _policy(policy, overrides)
        self._parts = gather_parts(model, optimizer, scheduler, state)
        self._clock = clock or SystemClock()
        if self.policy.cpu_malloc_threshold_bytes is not None and self._parts.device_type() == "cpu":
            set_malloc_threshold(self.policy.cpu_malloc_threshold_bytes)
        asked = self.policy.micro_batch_size
        self._ladder = MemoryLadder(
            largest=asked if isinstance(asked, int) else None, grow_after_steps=self.policy.grow_after_steps
        )
        self._cursor = None if loader is None else Cursor(loader, self._parts.devices())
        self._stop = StopRequest()
        self._session = Session(
            RunDirectory(os.path.expanduser(run_dir)), self._parts, self.policy, self._clock, __version__
        )
        self._transaction = Transaction(
            parts=self._parts,
            policy=self.policy,
            ladder=self._ladder,
            ranks=find_ranks(),
            recorder=self._session,
            split=split,
        )
        self.resumed_from: Path | None = None
        self._random_state: RandomState | None = None  # of a resumed run, until its loader is started
        self._driven = False  # batches() is running, so boundaries are known
        self._stepped = False  # a step was committed or skipped since the last boundary
        self._half_done = False  # a later step of the same batch failed: no boundary, so nothing to save
        self._rewound = False  # a rollback has moved the position: batches() must start its loader anew
        self._torn_at: int | None = None
        self._saved_at: tuple[int, int, int] | None = None
        self._tried_at_step: int | None = None
        weakref.finalize(self, self._stop.uninstall)
        self._open()
        try:
            self._resume()
        except BaseException:
            self._release()
            raise

    # --- facts ----------------------------------------------------------------------------------------------

    @property
    def global_step(self) -> int:
        """Return the optimizer steps in the weights, over all lives of the run."""
        return self._session.global_step

    @property
    def epoch(self) -> int:
        """Return the epochs that `batches` has completed."""
        return 0 if self._cursor is None else self._cursor.epoch

    @property
    def stop_reason(self) -> str | None:
        """Return why the run was asked to stop, such as ``"SIGTERM"``, or None."""
        return self._stop.reason

    def statistics(self) -> Statistics:
        """Return a snapshot of the run's totals.

        Cost: in fp16, one host sync.
        """
        counters, scaler = self._session.counters, self._transaction.scaler
        return Statistics(
            global_step=self.global_step,
            epoch=self.epoch,
            steps=counters.steps,
            skipped_steps=counters.skipped_steps,
            out_of_memory=counters.out_of_memory,
            rollbacks=counters.rollbacks,
            resumes=counters.resumes,
            checkpoints_saved=self._session.saved,
            checkpoints_failed=self._session.failed,
            micro_batch_size=self._ladder.plan.micro_batch_size,
            recompute=self._ladder.plan.recompute,
            loss_scale=None if scaler is None else scaler.get_scale(),
        )

    def events(self) -> list[Event]:
        """Return what was recorded in the run directory, oldest first, by earlier processes too."""
        return self._session.events()

    def request_stop(self, reason: str = "requested") -> None:
        """Ask the run to end at the next boundary, with a checkpoint."""
        self._stop.request(reason)

    # --- the loop -------------------------------------------------------------------------------------------

    def batches(self, *, max_epochs: int | None = None, max_steps: int | None = None) -> Iterator[Any]:
        """Yield batches from where the run stands, until a limit is reached or a stop was requested.

        A checkpoint is written when one is due and at the end; then the run directory is released. Leaving the
        loop with ``break`` writes none: use `request_stop`, or `close` afterwards.

        Args:
            max_epochs: Passes over the loader, counted over all lives of the run.
            max_steps: Optimizer steps, counted likewise.

        Raises:
            PolicyError: H105 without a loader or a limit. LoaderError: H601 for an empty loader, H602 if
                `max_steps` can never be reached since no step is made.
        """
        if self._cursor is None or (max_epochs is None and max_steps is None):
            missing = "loader=" if self._cursor is None else "max_epochs= or max_steps="
            raise PolicyError(
                f"batches() without {missing}",
                limit="it must know what to iterate and when to end",
                fix=f"pass {missing} to {'Guard' if self._cursor is None else 'batches()'}.",
                rule="H105",
            )
        return self._loop(self._cursor, max_epochs, max_steps)

    def _loop(self, cursor: Cursor, max_epochs: int | None, max_steps: int | None) -> Iterator[Any]:
        def finished() -> bool:
            enough = max_epochs is not None and cursor.epoch >= max_epochs
            return (
                enough or (max_steps is not None and self.global_step >= max_steps) or self._stop.reason is not None
            )

        self._ready()
        self._driven = True
        self._session.happened("loop", resume_promise=cursor.promise, epoch=cursor.epoch, batches=cursor.batches)
        try:
            self._save_first()
            while not finished():
                yield from self._epoch(cursor, finished, needs_steps=max_steps is not None)
            if self._stop.reason is not None:
                self._session.happened("stop_requested", reason=self._stop.reason)
            self._save()
        except GeneratorExit:
            raise
        except Exception:
            self._save()  # the loader failed at a boundary: nothing is lost
            raise
        finally:
            if self._stepped:
                cursor.advance()
            cursor.leave()
            self._driven = False
            self._release()

    def _epoch(self, cursor: Cursor, finished: Any, *, needs_steps: bool) -> Iterator[Any]:
        """Yield the rest of an epoch; returns early when finished or rewound."""
        iterator = cursor.begin(self._random_state)
        self._random_state = None
        before = self.global_step, self._session.counters.skipped_steps
        while True:
            try:
                with self._stop.interruptible():
                    batch = cursor.fetch(iterator)
            except (StopIteration, Interrupted) as end:
                if isinstance(end, Interrupted):
                    return
                break
            self._stepped = False
            yield batch
            if self._rewound:
                self._rewind()
                return
            cursor.advance()
            self._boundary()
            if finished():
                return
        if cursor.batches == 0:
            raise _empty_loader()
        if needs_steps and before == (self.global_step, self._session.counters.skipped_steps):
            raise _no_step()
        cursor.end_epoch()
        self._advance_schedulers("epoch", list(self._parts.optimizers))

    def _boundary(self) -> None:
        """Everything that belongs to the last batch is done: save if it is time."""
        self._stepped = False
        interval = self.policy.save_interval_steps
        if interval is not None and self.global_step // interval > (self._tried_at_step or 0) // interval:
            self._save()

    def _ready(self) -> None:
        """Open the run directory if it was released, and keep boundaries in a loop that is not ours."""
        if not self._session.is_open:
            self._open()
        if self._driven:
            return
        if self._stepped:
            self._boundary()
        if self._stop.by_signal:
            self._end_process()
        self._save_first()

    # --- the step -------------------------------------------------------------------------------------------

    def step(
        self,
        batch: Any,
        loss_fn: LossFunction,
        *,
        optimizer: str | Sequence[str] | None = None,
        split: Split | None = None,
    ) -> StepResult:
        """Make one training step: forward, backward, clip, optimizer step. All of it, or nothing.

        Args:
            batch: Any pytree of tensors.
            loss_fn: Takes a batch, or a part of one, and returns its scalar mean loss, or `Loss`, or a pair
                (mean, items). It may run several times, so it should change nothing but the model's buffers.
            optimizer: Name(s) of the optimizers to step; None: all. Gradients reach only their parameters.
            split: Overrides the guard's `split` for this batch.

        Returns:
            What happened. ``skipped`` is True if the weights were left as they were.

        Raises:
            BatchError: H2xx, if the batch or the loss cannot be used; no trace is left.
            OutOfMemoryError: H401 if no remedy is left, H402 if an optimizer failed half-way for good.
            NonFiniteError: H501, if NaN or Inf persists.
        """
        names = self._names(optimizer)
        self._ready()
        started = self._clock.monotonic_seconds()
        session, plan = self._session, self._ladder.plan
        session.step(StepMark.BEGUN, plan.micro_batch_size, math.nan, math.nan, 0.0)
        torn: TornStep | None = None
        try:
            outcome = self._transaction.run(
                batch, loss_fn, names, split=split, stop_requested=self._stop.reason is not None
            )
        except TornStep as error:
            torn = error
        except BaseException as error:
            self._half_done = self._half_done or self._stepped or self._transaction.committing
            if isinstance(error, OutOfMemoryError) and not self._half_done:
                self._save()  # the weights are those of the last step: keep them
            raise
        if torn is not None:
            return self._mend(torn)
        self._stepped = True
        if outcome.attempts > 1:
            session.counters.out_of_memory += outcome.attempts - 1
        result = self._committed(outcome, names) if outcome.committed else self._skipped(outcome)
        if self._ladder.plan != plan:
            session.directory.remember_ladder(self._ladder.state_dict())
        facts, samples = outcome.attempt.facts, outcome.attempt.micro_batch_size
        mark = StepMark.COMMITTED if outcome.committed else StepMark.SKIPPED
        session.step(mark, samples, facts.loss, facts.total, self._clock.monotonic_seconds() - started)
        return result

    def _committed(self, outcome: Outcome, names: Sequence[str]) -> StepResult:
        session, counters = self._session, self._session.counters
        session.global_step += 1
        counters.steps += 1
        counters.nonfinite_in_a_row = 0
        counters.good_steps_in_a_row += 1
        if counters.good_steps_in_a_row >= (self.policy.nonfinite_patience or 1):
            counters.rollbacks_in_a_row = 0
        if outcome.attempt.facts.overflowed:
            session.happened("norm_overflowed", total=outcome.attempt.facts.total)
        self._advance_schedulers("step", names)
        larger = self._ladder.decide_after_step(batch_size=outcome.size or 1, attempts=outcome.attempts)
        if larger is not None:
            session.decided(larger)
        return _result(outcome, None)

    def _advance_schedulers(self, interval: Literal["step", "epoch"], names: Sequence[str]) -> None:
        if self.policy.scheduler_interval != interval:
            return
        moved = [self._parts.optimizers[name] for name in names]
        for scheduler in self._parts.schedulers.values():
            if advances_alone(scheduler) and any(scheduler.optimizer is each for each in moved):
                scheduler.step()

    def _skipped(self, outcome: Outcome) -> StepResult:
        session, counters = self._session, self._session.counters
        counters.skipped_steps += 1
        loss = outcome.attempt.facts.loss
        reason = describe_nonfinite(loss, outcome.culprits, outcome.culprit_count)
        scale = None if self._transaction.scaler is None else self._transaction.scaler.get_scale()
        if outcome.scale_search:
            # fp16 finds its loss scale by trying: no sign of trouble as long as the scale stays above 1.
            session.happened("loss_scale_lowered", loss_scale=scale)
            return _result(outcome, f"{reason}; fp16 loss scale lowered to {scale:g}")
        if scale is not None and scale < 1.0:
            session.happened("loss_scale_collapsed", loss_scale=scale)
        counters.nonfinite_in_a_row += 1
        counters.good_steps_in_a_row = 0
        decision = decide_after_nonfinite(
            reason=reason,
            in_a_row=counters.nonfinite_in_a_row,
            patience=self.policy.nonfinite_patience,
            rollbacks_in_a_row=counters.rollbacks_in_a_row,
            max_rollbacks=self.policy.max_rollbacks,
        )
        session.decided(decision, epoch=self.epoch, batch=None if self._cursor is None else self._cursor.batches)
        if isinstance(decision, RollBack):
            entry = self._roll_back()
            if entry is None:
                decision = Stop(reason=f"{decision.reason}; no checkpoint to return to", promise="changes training")
                session.decided(decision)
            else:
                reason = f"{reason}; rolled back to step {self.global_step}"
        if isinstance(decision, Stop):
            raise NonFiniteError(
                decision.reason,
                limit=f"nonfinite_patience={self.policy.nonfinite_patience} and "
                f"max_rollbacks={self.policy.max_rollbacks} are spent",
                fix="lower the learning rate, set max_grad_norm, check the data of the batches that the events name; "
                "the newest checkpoint is finite.",
                rule="H501",
            )
        return _result(outcome, reason)

    # --- going back -----------------------------------------------------------------------------------------

    def _roll_back(self) -> Path | None:
        """Return to the newest good checkpoint, passing over the batches since; None if there is none."""
        entry = self._session.newest_good()
        if entry is None:
            return None
        counters = self._session.counters
        self._load_scaler(self._session.restore(entry))
        counters.rollbacks += 1
        counters.rollbacks_in_a_row += 1
        counters.nonfinite_in_a_row = 0
        return entry.path

    def _mend(self, torn: TornStep) -> StepResult:
        """After an optimizer ran out of memory half-way: return to the last good state, data included."""
        session = self._session
        session.counters.out_of_memory += 1
        at_step = self.global_step
        entry = session.newest_good() if self.policy.save_interval_steps is not None else None
        if entry is None or self._torn_at == at_step:
            self._half_done = True
            session.decided(Stop(reason=str(torn), promise="bit-exact"))
            raise OutOfMemoryError(
                f"the optimizer ran out of memory in the middle of step {at_step + 1} ({torn})",
                limit="its weights and moments are half changed, "
                + ("and it happened twice at this step" if entry is not None else "and there is no checkpoint"),
                fix="leave it more memory (a smaller model or optimizer, fused=True); the newest checkpoint, if "
                "there is one, is from before.",
                rule="H402",
            )
        self._torn_at = at_step
        self._transaction.committing = False
        session.decided(
            RollBack(
                reason=str(torn),
                promise="bit-exact" if self._driven else "changes training",
                rewind_data=self._driven,
            )
        )
        self._load_scaler(session.restore(entry))
        session.counters.rollbacks += 1
        for optimizer in self._parts.optimizers.values():
            for group in optimizer.param_groups:
                if not group.get("fused") and "foreach" in group:
                    group["foreach"] = False  # one tensor at a time: the smallest temporaries
        self._rewound = self._driven
        self._stepped = True
        return _result(torn.outcome, f"{torn}; returned to step {self.global_step}")

    def _rewind(self) -> None:
        """At the boundary, restore again: the rest of the loop body ran on state that was already restored."""
        entry = self._session.newest_good()
        assert entry is not None
        assert self._cursor is not None
        training = self._session.restore(entry)
        self._load_scaler(training)
        self._cursor.load_state_dict(training["position"])
        self._random_state = random_state_of(training)
        self._rewound = self._stepped = False

    def _load_scaler(self, training: Mapping[str, Any]) -> None:
        scaler = self._transaction.scaler
        if scaler is not None and training["scaler"] is not None:
            scaler.load_state_dict(training["scaler"])

    def _resume(self) -> None:
        entry = self._session.newest_good()
        if entry is None:
            remembered = self._session.directory.recall_ladder()
            if remembered is not None:
                self._ladder.load_state_dict(remembered)
            return
        training = self._session.restore(entry)
        self._load_scaler(training)
        self._ladder.load_state_dict(training["ladder"])
        if self._cursor is not None and training["position"] is not None:
            self._cursor.load_state_dict(training["position"])
        self._random_state = random_state_of(training)
        restore(self._random_state)
        self._session.counters = Counters(**training["counters"])
        self._session.counters.resumes += 1
        self.resumed_from = entry.path
        self._tried_at_step = self.global_step
        self._saved_at = self._position()
        self._session.happened("resumed", checkpoint=entry.path.name, epoch=self.epoch)

    # --- saving, opening, closing ---------------------------------------------------------------------------

    def _position(self) -> tuple[int, int, int]:
        cursor = self._cursor
        return self.global_step, self.epoch, 0 if cursor is None else cursor.batches

    def _save_first(self) -> None:
        """Have a state to return to before the first step."""
        if self._tried_at_step is None:
            self._save()

    def _save(self) -> None:
        """Write a checkpoint unless the newest one is of this very state, or this state is not whole."""
        if self.policy.save_interval_steps is None or self._half_done or self._saved_at == self._position():
            return
        self._tried_at_step = self.global_step
        saved = self._session.save(
            cursor=self._cursor,
            ladder=self._ladder,
            scaler=self._transaction.scaler,
            buffers=self._transaction.buffers.mutable(),
        )
        if saved:
            self._saved_at = self._position()

    def _open(self) -> None:
        self._session.open()
        self._stop.install()

    def _release(self) -> None:
        self._stop.uninstall()
        self._session.close()

    def close(self) -> None:
        """Write what is not saved yet, and release the run directory. May be called again."""
        if self._stepped and self._cursor is not None:
            self._cursor.advance()
        self._stepped = False
        if self._tried_at_step is not None and self._saved_at != self._position() and not self._half_done:
            if not self._session.is_open:
                self._open()
            self._save()
        self._release()

    def __enter__(self) -> Guard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._release()

    def _end_process(self) -> None:
        """Save and end the process cleanly, where there is no loop of ours that could end."""
        self._session.happened("stop_requested", reason=self._stop.reason)
        if self._cursor is not None and self._stepped:
            self._cursor.advance()
        self._save()
        self._release()
        raise SystemExit(0)

    # --- evaluation -----------------------------------------------------------------------------------------

    @contextmanager
    def evaluate(self) -> Iterator[None]:
        """Switch the models to evaluation without gradients, and leave no trace in training.

        Train/eval modes and random state are as before afterwards. SIGTERM inside ends the process with exit
        code 0 after a checkpoint, since an evaluation that was cut short has no result to go on with;
        `request_stop` lets it finish and ends the loop after this batch.
        """
        modules = [module for model in self._parts.models.values() for module in model.modules()]
        modes = [module.training for module in modules]
        random_state = capture(self._parts.devices())
        interrupted = False
        try:
            with self._stop.interruptible(), torch.no_grad():
                for model in self._parts.models.values():
                    model.eval()
                yield
        except Interrupted:
            interrupted = True
        finally:
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode
            restore(random_state)
        if interrupted:
            self._end_process()

    def _names(self, optimizer: str | Sequence[str] | None) -> list[str]:
        known = list(self._parts.optimizers)
        if optimizer is None:
            return known
        names = [optimizer] if isinstance(optimizer, str) else list(optimizer)
        for name in names:
            if name not in known:
                nearest = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)[0]
                raise PolicyError(
                    f"optimizer={name!r}",
                    limit=f"the optimizers of this guard are {', '.join(map(repr, known))}",
                    fix=f"did you mean {nearest!r}?",
                    rule="H104",
                )
        return names


def _policy(policy: Policy | str | os.PathLike[str] | None, overrides: dict[str, Any]) -> Policy:
    if policy is None:
        return Policy(**overrides)
    if isinstance(policy, Policy):
        return policy.replace(**overrides) if overrides else policy
    return Policy.from_yaml(policy, **overrides)


def _result(outcome: Outcome, reason: str | None) -> StepResult:
    attempt = outcome.attempt
    return StepResult(
        loss=attempt.loss,
        items=attempt.items,
        grad_norm=attempt.facts.norms,
        micro_batch_size=attempt.micro_batch_size,
        attempts=outcome.attempts,
        skipped=reason is not None,
        reason=reason,
    )


def _empty_loader() -> LoaderError:
    return LoaderError(
        "the loader gave no batch in a whole epoch",
        limit="at least one is needed",
        fix="check the path of the data, filters, and drop_last with a batch size above the number of samples; an "
        "iterator that was used up cannot be iterated again, pass the iterable itself.",
        rule="H601",
    )


def _no_step() -> LoaderError:
    return LoaderError(
        "a whole epoch passed without guard.step()",
        limit="max_steps counts optimizer steps and would never be reached",
        fix="call guard.step(batch, loss_fn) in the loop, or pass max_epochs.",
        rule="H602",
    )
