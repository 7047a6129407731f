"""Draw the faults of a campaign: what to inject into the first attempt and into its restarts.

Only faults that are possible for the command are drawn. For example, no fault kills a loader worker
if the undisturbed run has no workers.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from holdfast.chaos.checkpoint_damage import (
    DamageAction,
    flip_random_bit,
    leave_intact,
    truncate_to_half,
)
from holdfast.chaos.comparison.reference import Reference
from holdfast.chaos.injection.plan import Action, Injection, Moment
from holdfast.chaos.trace import RecordedSave

# All kinds of faults, in the order in which reports show them.
KINDS = (
    "kill",
    "term",
    "first",
    "save",
    "eval",
    "worker",
    "rank",
    "memory",
    "nan",
    "disk",
    "io",
    "clock",
    "damage",
)

# The number of faults that kill the process at a random step. The run is divided into this many
# equal parts, and one of these faults is drawn for each part.
RANDOM_KILLS = 3
# How long the command may take to exit after SIGTERM. Slurm and Kubernetes allow 30 s, but a
# training run that saves immediately needs less, and a longer time would slow down the campaign.
SIGTERM_GRACE_SECONDS = 15.0
# How long a slow rank is stopped: longer than a step, but shorter than the timeout of collectives.
SLOW_RANK_SECONDS = 10.0
# How far the clock is set back: one hour, as at the end of daylight saving time. This is longer
# than a short run takes.
CLOCK_SHIFT_SECONDS = -3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of a campaign.

    Args:
        kind: The kind of fault, which is one of `KINDS`.
        description: A description of the fault, for the report.
        injection: What to inject into the first attempt.
        damage: How to damage the newest checkpoint between the first two attempts; None for no
            damage.
        restart_injections: What to inject into each restart, in order. The last item also applies
            to all later restarts.
    """

    kind: str
    description: str
    injection: Injection
    damage: DamageAction | None = None
    restart_injections: tuple[Injection, ...] = ()


class FaultDraw:
    """Draws the faults of a campaign.

    All faults are always drawn in the same order, even if only some kinds are requested. Each fault
    therefore depends only on the seed.

    Args:
        reference: The undisturbed run of the lowest rank.
        chance: The random generator from which steps, saves and ranks are drawn.
    """

    def __init__(self, reference: Reference, chance: random.Random) -> None:
        self._chance = chance
        # The moments of faults are drawn from the steps of the process that takes the most steps.
        self._segment = max(reference.segments, key=lambda segment: len(segment.steps))
        self._step_count = len(self._segment.steps)
        self._saves = self._segment.saves
        # The number of steps before the first save from which a restart can resume.
        self._first_save_step = min(
            (save.steps_made for save in self._saves if save.steps_made < self._step_count),
            default=0,
        )

    def draw(self) -> list[Fault]:
        """Return all faults, in the order of `KINDS`."""
        faults = [
            *self._kill_or_terminate(),
            *self._kill_and_stop_worker(),
            *self._kill_and_stop_rank(),
            *self._use_up_memory(),
            *self._put_nan(),
            *self._kill_in_evaluation(),
        ]
        if self._saves:
            damage_step = self._draw_step()
            faults += [
                *self._disturb_save(),
                *self._damage_checkpoint(damage_step),
                self._fail_read(),
                self._shift_clock(),
            ]
        faults += self._slow_down_and_cut_off_rank()
        return sorted(faults, key=lambda fault: KINDS.index(fault.kind))

    # --- every change to a file -----------------------------------------------------------------

    @property
    def watch(self) -> Injection | None:
        """Return an injection that lists how a save changes files, or None without such a save.

        It watches the last save that is followed by a step. Unlike the first save, it replaces
        files and may remove old ones.

        The list begins at the end of the step before the save, because a script may change several
        files, and some of them before its first call of `torch.save`.
        """
        step = self._step_of_watched_save
        if step is None:
            return None
        if step == 0:
            return Injection(action=Action.WATCH_CHANGES, moment=Moment.SAVE_BEGINS, count=1)
        return Injection(action=Action.WATCH_CHANGES, moment=Moment.AFTER_STEP, count=step)

    @property
    def _step_of_watched_save(self) -> int | None:
        """Return the number of steps before the watched save, or None if there is no such save."""
        steps = [save.steps_made for save in self._saves if save.steps_made < self._step_count]
        return steps[-1] if steps else None

    def kill_before_each(self, changes: Sequence[str]) -> list[Fault]:
        """Return faults that kill the process before each change to a file that `watch` lists.

        Writes in the middle of a file come last, because a reader usually treats all incomplete
        files alike.

        Args:
            changes: Descriptions of the system calls that change files, in order.
        """
        watch = self.watch
        assert watch is not None
        at_boundaries = []
        in_the_middle = []
        previous = None
        for call, change in enumerate(changes, start=1):
            injection = replace(watch, change_number=call)
            place = f"change {call} of {len(changes)} after step {self._step_of_watched_save}"
            fault = Fault(
                kind="save", description=f"SIGKILL before {place}: {change}", injection=injection
            )
            if change == previous:
                in_the_middle.append(fault)
            else:
                at_boundaries.append(fault)
            previous = change
        return at_boundaries + in_the_middle

    # --- the process ----------------------------------------------------------------------------

    def _kill_or_terminate(self) -> Iterable[Fault]:
        """Yield faults that kill the process or ask it to exit.

        SIGKILL is sent in the first step and in random steps, and SIGTERM is sent in a random step.
        """
        yield Fault(
            kind="first", description="SIGKILL in the first step", injection=_kill_in_backward(0)
        )
        moments = [
            self._chance.choice([Moment.BACKWARD, Moment.BEFORE_STEP]) for _ in range(RANDOM_KILLS)
        ]
        for part, moment in enumerate(moments):
            step = self._draw_step(part)
            injection = Injection(action=Action.SIGKILL, moment=moment, count=step)
            yield _in_step("kill", "SIGKILL in", injection)
        injection = Injection(
            action=Action.SIGTERM,
            moment=Moment.BACKWARD,
            count=self._draw_step(),
            later_seconds=SIGTERM_GRACE_SECONDS,
        )
        yield _in_step("term", "SIGTERM in", injection)

    def _kill_in_evaluation(self) -> Iterable[Fault]:
        """Yield a fault that kills the process in an evaluation in the second half of the run."""
        evaluations = sum(1 for _ in self._segment.events("eval"))
        if evaluations == 0:
            return
        number = self._chance.randint((evaluations + 1) // 2, evaluations)
        yield Fault(
            kind="eval",
            description=f"SIGKILL in evaluation {number}",
            injection=Injection(action=Action.SIGKILL, moment=Moment.EVALUATION, count=number),
        )

    # --- workers and ranks ----------------------------------------------------------------------

    def _kill_and_stop_worker(self) -> Iterable[Fault]:
        if not any(self._segment.events("workers")):
            return
        for action, words in ((Action.KILL_WORKER, "killed"), (Action.STOP_WORKER, "stopped")):
            injection = Injection(action=action, moment=Moment.LOADER, count=self._draw_step())
            yield _in_step("worker", f"a loader worker {words} in", injection)

    def _kill_and_stop_rank(self) -> Iterable[Fault]:
        if self._segment.world_size > 1:
            yield self._disturb_rank("killed", Injection(action=Action.SIGKILL))
            yield self._disturb_rank("stopped", Injection(action=Action.SIGSTOP))

    def _slow_down_and_cut_off_rank(self) -> Iterable[Fault]:
        """Yield a fault that stops a rank temporarily, and one that cuts a rank's connections."""
        if self._segment.world_size > 1:
            slow = Injection(
                action=Action.SIGSTOP,
                later_seconds=SLOW_RANK_SECONDS,
            )
            yield self._disturb_rank(f"stopped for {SLOW_RANK_SECONDS:.0f} s", slow)
            yield self._disturb_rank("cut off", Injection(action=Action.CUT_CONNECTIONS))

    def _disturb_rank(self, words: str, injection: Injection) -> Fault:
        """Return a fault in the backward pass of a random step, on a random rank other than 0.

        Args:
            words: What happens to the rank, for the description.
            injection: What to inject. The moment, the step and the rank are filled in.
        """
        rank = self._chance.randrange(1, self._segment.world_size)
        injection = replace(injection, moment=Moment.BACKWARD, count=self._draw_step(), rank=rank)
        return _in_step("rank", f"rank {rank} {words} in", injection)

    # --- memory and data ------------------------------------------------------------------------

    def _use_up_memory(self) -> Iterable[Fault]:
        injection = Injection(
            action=Action.USE_UP_MEMORY, moment=Moment.BACKWARD, count=self._draw_step()
        )
        yield _in_step("memory", "out of memory in", injection)

    def _put_nan(self) -> Iterable[Fault]:
        """Yield a fault that puts a NaN into a loader's batch or, without one, a model's inputs."""
        step = self._draw_step()
        steps = self._segment.steps
        if any(batch is not None for step_record in steps for batch in step_record.batch):
            moment = Moment.LOADER
        elif any(inputs is not None for step_record in steps for inputs in step_record.inputs):
            moment = Moment.FORWARD
        else:
            return
        injection = Injection(action=Action.PUT_NAN, moment=moment, count=step)
        yield _in_step("nan", "a NaN in the batch of", injection)

    # --- saves and checkpoints ------------------------------------------------------------------

    def _disturb_save(self) -> Iterable[Fault]:
        """Yield faults that occur during a save: kills, a full disk, and a write that fails."""
        # Choose a later save than the first one if possible: only later saves replace a checkpoint.
        number = self._chance.randint(min(2, len(self._saves)), len(self._saves))
        save = self._saves[number - 1]
        yield Fault(
            kind="save",
            description=f"SIGKILL after writing in {_name_of_save(number, save)}",
            injection=Injection(action=Action.SIGKILL, moment=Moment.SAVE_ENDS, count=number),
        )
        # With this limit on file sizes, the largest checkpoint cannot be written completely.
        half_bytes = max(save.size_bytes for save in self._saves) // 2
        if half_bytes == 0:
            return
        yield from self._cut_writes(save)
        yield self._fill_disk(half_bytes)
        yield Fault(
            kind="io",
            description=f"a write fails (EIO) in the middle of {_name_of_save(number, save)}",
            injection=Injection(
                action=Action.FAIL_WRITE,
                moment=Moment.SAVE_BEGINS,
                count=number,
                size_bytes=half_bytes,
                errno=errno.EIO,
                refuse_once=True,
            ),
        )

    def _fill_disk(self, size_bytes: int) -> Fault:
        """Return a fault that simulates a full disk: no file can grow beyond `size_bytes`."""
        return Fault(
            kind="disk",
            description=(
                f"disk full in the middle of a checkpoint, from step {self._first_save_step} on"
            ),
            injection=Injection(
                action=Action.FILL_DISK,
                moment=Moment.AFTER_STEP,
                count=self._first_save_step,
                size_bytes=size_bytes,
                errno=errno.ENOSPC,
            ),
        )

    def _cut_writes(self, save: RecordedSave) -> Iterable[Fault]:
        """Yield faults that kill the process in the middle of writing a file.

        Several files may be saved at the same step as `save`. One fault is for the first of these
        files, and one for the last.
        """
        numbers = [
            number
            for number, other in enumerate(self._saves, start=1)
            if other.steps_made == save.steps_made
        ]
        for number in sorted({numbers[0], numbers[-1]}):
            yield Fault(
                kind="save",
                description=f"SIGKILL in the middle of writing {_name_of_save(number, save)}",
                injection=Injection(
                    action=Action.CUT_WRITE,
                    moment=Moment.SAVE_BEGINS,
                    count=number,
                    size_bytes=self._saves[number - 1].size_bytes // 2,
                ),
            )

    def _damage_checkpoint(self, step: int) -> Iterable[Fault]:
        """Yield faults that kill the process and then damage its newest checkpoint.

        Args:
            step: The index of the step in which the process is killed.
        """
        actions: tuple[tuple[str, DamageAction], ...] = (
            ("a bit of the newest checkpoint flipped", flip_random_bit),
            ("the newest checkpoint cut in half", truncate_to_half),
        )
        for words, action in actions:
            yield Fault(
                kind="damage",
                description=f"SIGKILL in step {step + 1}, {words}",
                injection=_kill_in_backward(step),
                damage=action,
            )

    def _fail_read(self) -> Fault:
        """Return a fault that kills the process and then makes a read of its checkpoint fail.

        The first read of the newest checkpoint in the first restart fails. The file itself remains
        intact, so later restarts can read it.
        """
        step = self._draw_step()
        return Fault(
            kind="io",
            description=(
                f"SIGKILL in step {step + 1}, a read of the newest checkpoint fails (EIO)"
            ),
            injection=_kill_in_backward(step),
            damage=leave_intact,
            restart_injections=(Injection(errno=errno.EIO, refuse_once=True), Injection()),
        )

    def _shift_clock(self) -> Fault:
        """Return a fault that kills the process and sets the clock back for the restarts.

        If the run saves another checkpoint, the process is killed a second time after this save. A
        script that finds the newest checkpoint by the time in its name then resumes from the wrong
        checkpoint.
        """
        first = self._first_save_step
        description = f"SIGKILL in step {first + 1}, the clock set back an hour"
        shifted = Injection(clock_shift_seconds=CLOCK_SHIFT_SECONDS)
        restart_injections: tuple[Injection, ...] = (shifted,)
        # The second attempt resumes from the first save and counts its own steps from 0. It takes
        # one more step after the next save before it is killed, hence the `+ 1`.
        steps_after_next_save = [
            save.steps_made - first + 1
            for save in self._saves
            if first < save.steps_made < self._step_count - 1
        ]
        if steps_after_next_save:
            description += ", SIGKILL after the next save"
            killed_again = replace(
                _kill_in_backward(min(steps_after_next_save)),
                clock_shift_seconds=CLOCK_SHIFT_SECONDS,
            )
            restart_injections = (killed_again, shifted)
        return Fault(
            kind="clock",
            description=description,
            injection=_kill_in_backward(first),
            restart_injections=restart_injections,
        )

    def _draw_step(self, part: int | None = None) -> int:
        """Draw a random step after the first save, and return its index.

        Args:
            part: If the steps after the first save are divided into `RANDOM_KILLS` equal parts, the
                index of the part to draw from. None draws from all of these steps.
        """
        lowest = min(self._first_save_step + 1, self._step_count - 1)
        position = self._chance.random()
        if part is not None:
            position = (part + position) / RANDOM_KILLS
        return lowest + int((self._step_count - lowest) * position)


def _name_of_save(number: int, save: RecordedSave) -> str:
    return f"save {number} (step {save.steps_made})"


def _in_step(kind: str, words: str, injection: Injection) -> Fault:
    """Return a fault that is described as "`words` step N", where N is the step's number."""
    # The injection counts the steps before the fault, and people count steps from 1.
    description = f"{words} step {injection.count + 1}"
    return Fault(kind=kind, description=description, injection=injection)


def _kill_in_backward(step: int) -> Injection:
    return Injection(action=Action.SIGKILL, moment=Moment.BACKWARD, count=step)
