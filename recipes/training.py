"""What all recipes do around their own loop.

Where to train, a bar while it goes, a report and figures at its end.

Ctrl-C ends a loop at the end of the batch and with a checkpoint, and the process with exit code
130; an error of holdfast, or of data that cannot be read, ends it with the error's text and exit
code 1. There is a report of both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from holdfast import Guard, HoldfastError, Policy
from holdfast.core.durable import replace_file
from holdfast.memory.oom import find_out_of_memory
from holdfast.report.page.gathering import gather
from holdfast.report.page.run_page import render
from holdfast.report.sources import check_run
from recipes.options import OptionError, RunOptions, nothing_to_resume

_SECONDS_BETWEEN_PICTURES = 0.2  # of the bar
_SECONDS_BETWEEN_LINES = 10.0  # where nobody sees one
_TELLING = {"finding", "preflight", "loader_healed", "sample_quarantined", "nonfinite_origin"}
_INTERRUPTED = 130  # the exit code of what Ctrl-C has ended, as shells have it


def find_device(options: RunOptions) -> torch.device:
    """Return the device that was asked for, and exit with a message where there is none such."""
    name = options.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError) as error:  # torch without CUDA raises the latter
        why = str(error).splitlines()[0]
        print(
            f"--device {name} cannot be used: {why}\nFix: --device cpu, or auto.", file=sys.stderr
        )
        raise SystemExit(2) from None
    return torch.device(name)


def fused_on(device: torch.device) -> bool | None:
    """Return the argument ``fused`` of an optimizer for parameters on a device.

    With a fused optimizer, a guard reads the result of a step one step later, so a GPU does not
    wait for it. On the CPU the argument is None, which is torch's default.
    """
    return True if device.type == "cuda" else None


@contextlib.contextmanager
def at_the_command_line() -> Iterator[None]:
    """Return a context in which Ctrl-C ends the process with a line and exit code 130, where no
    loop takes it.
    """
    try:
        yield
    except KeyboardInterrupt:
        print(
            "interrupted: the same command begins anew, or goes on from the newest checkpoint",
            file=sys.stderr,
        )
        raise SystemExit(_INTERRUPTED) from None


@contextlib.contextmanager
def ending_clearly(kind: type[Exception], run_dir: Path | None = None) -> Iterator[None]:
    """Return a context in which what cannot be used ends the process with its message.

    Args:
        kind: Of errors that the recipe has for its data.
        run_dir: Of a training that runs, whose records tell more; None while nothing is lost, with
            exit code 2.
    """
    kinds = (
        (kind, HoldfastError)
        if run_dir is not None
        else (kind, HoldfastError, OptionError, OSError)
    )
    try:
        yield
    except kinds as error:
        more = "" if run_dir is None else _told_meanwhile(run_dir)
        print(f"{error}{more}", file=sys.stderr)
        raise SystemExit(2 if run_dir is None else 1) from None


def _told_meanwhile(run_dir: Path) -> str:
    return f"\nWhat was found meanwhile: holdfast explain {run_dir}"


@contextlib.contextmanager
def making_the_model() -> Iterator[None]:
    """Return a context in which a model that is too large for this machine ends the process,
    with exit code 2.
    """
    try:
        yield
    except (RuntimeError, MemoryError, OverflowError, TypeError) as error:
        if find_out_of_memory(error) is None and "overflow" not in str(error).lower():
            raise
        why = (str(error) or "no memory is left").splitlines()[0]
        told = (
            f"a model of these sizes cannot be made here: {why}\nFix: smaller sizes; `holdfast"
            " plan` says what fits."
        )
        print(told, file=sys.stderr)
        raise SystemExit(2) from None


class RecipeGuard(Guard):
    """A guard that ends the process clearly where an error of holdfast leaves its ``with`` block,
    not in a notebook.

    Args:
        options: Of the recipe.
        policy: Of the run.
        **parts: What else `Guard` takes.
    """

    def __init__(self, options: RunOptions, policy: Policy, **parts: Any) -> None:
        super().__init__(options.run_dir, policy=policy, **parts)
        self._run_dir = options.run_dir

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *rest: object
    ) -> None:
        super().__exit__(kind, error, *rest)
        if not is_interactive():
            end_failed(self, self._run_dir, error)


def end_failed(guard: Guard, run_dir: Path, error: BaseException | None) -> None:
    """End the process with a report and the text of an error, if that is one of holdfast or of
    data; else return.
    """
    told = _told(error)
    if told is not None:
        why = error.what if isinstance(error, HoldfastError) else told.splitlines()[0]
        _write_what_there_is(guard, run_dir, why)
        print(f"{told}{_told_meanwhile(run_dir)}", file=sys.stderr)
        raise SystemExit(1) from None


def end_interrupted(guard: Guard, run_dir: Path, *, saves: bool) -> NoReturn:
    """End the process after Ctrl-C, with a report, and say how to go on."""
    _write_what_there_is(guard, run_dir, "SIGINT")
    how = (
        "the same command, or with --resume, goes on from here"
        if saves
        else "this run saves no checkpoints"
    )
    print(f"interrupted at step {guard.global_step}: {how}", file=sys.stderr)
    raise SystemExit(_INTERRUPTED) from None


def _write_what_there_is(guard: Guard, run_dir: Path, why: str) -> None:
    try:
        _write_end(guard, run_dir, {"found": found(guard)}, stopped=why)
    except (MemoryError, OSError) as error:  # memory may be what is short
        print(f"no report: {error!r}", file=sys.stderr)


def _told(error: BaseException | None) -> str | None:
    """Return what is said of an error of holdfast, or of data that holdfast's loader met.

    None for any other.
    """
    if isinstance(error, HoldfastError):
        return str(error)
    notes = getattr(error, "__notes__", [])
    if (
        isinstance(error, (ValueError, OSError))
        and notes
        and notes[-1].startswith("In holdfast.DataLoader")
    ):
        return "\n".join([str(error), *notes[:-1]])  # without the traceback in a dataset
    return None


def is_interactive() -> bool:
    """Say whether this is a notebook or a prompt, where errors and Ctrl-C end a cell and not the
    process.
    """
    return hasattr(sys, "ps1")


def open_guard(options: RunOptions, policy: Policy, **parts: Any) -> RecipeGuard:
    """Return the guard of a recipe.

    What holdfast refuses ends the process with its message and exit code 2.

    Args:
        options: Of the recipe.
        policy: Of the run.
        **parts: What else `Guard` takes: model, optimizer, scheduler, loader, state, split.
    """
    optimizers = parts.get("optimizer")
    optimizers = tuple(optimizers.values()) if isinstance(optimizers, Mapping) else (optimizers,)
    asked = _learning_rates(optimizers)
    try:
        guard = RecipeGuard(options, policy, **parts)
    except HoldfastError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    if options.resume and guard.resumed_from is None:
        guard.close()
        print(nothing_to_resume(options.run_dir), end="", file=sys.stderr)
        raise SystemExit(2)
    if guard.resumed_from is not None:
        print(f"going on from step {guard.global_step} ({guard.resumed_from})", file=sys.stderr)
        if (used := _learning_rates(optimizers)) != asked:
            print(
                f"the learning rate is the checkpoint's, {used}, not {asked}. Fix: another"
                " --run-dir begins anew.",
                file=sys.stderr,
            )
    return guard


def _learning_rates(optimizers: Iterable[Any]) -> str:
    """Return with which learning rates optimizers began, before any scheduler."""
    groups = [group for each in optimizers if each is not None for group in each.param_groups]
    return ", ".join(
        dict.fromkeys(f"{float(group.get('initial_lr', group['lr'])):.6g}" for group in groups)
    )


def tell_if_ended(step: int, most: int) -> bool:
    """Say whether a run has made all its steps before this life, here and on stderr."""
    if step >= most:
        print(f"already at step {step} of {most}: nothing is left to train", file=sys.stderr)
    return step >= most


class Training:
    """One life of a recipe's run: its batches under a bar, and what is written at its end.

    The bar is drawn on stderr; where that is no terminal a line is printed now and then.

    Args:
        guard: Of the run.
        options: Of the recipe.
        speaks: Whether this process shows and writes anything: of several ranks, the first one
            does.
    """

    def __init__(self, guard: RecipeGuard, options: RunOptions, *, speaks: bool = True) -> None:
        self.guard = guard
        self.options = options
        self._speaks = speaks
        self._shown: dict[str, float | str | torch.Tensor] = {}

    def show(self, **values: float | str | torch.Tensor) -> None:
        """Show values beside the bar, such as ``loss=0.25``.

        A tensor is read only when the bar is drawn, so that a GPU does not wait in each step.
        """
        self._shown = values

    def _text_beside_the_bar(self) -> str:
        return "  ".join(
            f"{name} {value if isinstance(value, str) else f'{value:.4g}'}"
            for name, value in self._shown.items()
        )

    def batches(self) -> Iterator[Any]:
        """Yield the guard's batches up to ``max_steps`` of the options.

        After Ctrl-C, end the process.
        """
        try:
            yield from self._under_a_bar()
        except KeyboardInterrupt:
            if is_interactive() or self.guard.stop_reason is None:
                raise
            # The guard has saved, and raises it so that nothing after the loop runs.
            saves = self.guard.policy.save_interval_steps is not None
            end_interrupted(self.guard, self.options.run_dir, saves=saves)

    def _under_a_bar(self) -> Iterator[Any]:
        guard, most = self.guard, self.options.max_steps
        if tell_if_ended(guard.global_step, most):
            yield from guard.batches(max_steps=most)  # none, as it says itself
            return
        if not self._speaks:
            yield from guard.batches(max_steps=most)
            return
        console, last = Console(stderr=True, force_jupyter=False), time.monotonic()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        told = TextColumn("{task.fields[told]}")
        # A thread of its own may not start where memory is short, and may hold a lock when workers
        # are forked.
        with Progress(*columns, told, console=console, transient=True, auto_refresh=False) as bar:
            console.show_cursor()  # a second Ctrl-C would leave the terminal without one
            task = bar.add_task("step", total=most, completed=guard.global_step, told="")
            for batch in guard.batches(max_steps=most):
                yield batch
                waited = time.monotonic() - last
                if waited < (
                    _SECONDS_BETWEEN_PICTURES if console.is_terminal else _SECONDS_BETWEEN_LINES
                ):
                    continue
                last += waited
                # Reading a loss may lower the global step, so the text is made first.
                text = self._text_beside_the_bar()
                if console.is_terminal:
                    bar.update(task, completed=guard.global_step, told=text, refresh=True)
                else:
                    print(
                        f"step {guard.global_step} of {most}  {text}",
                        file=sys.stderr,
                        flush=True,
                    )

    def finish(self, model: torch.nn.Module, figures: Mapping[str, Any]) -> dict[str, Any]:
        """Write ``result.json`` and ``report.html`` into the run directory, and say what came of
        the run.

        Args:
            model: Whose weights are digested, so that two runs can be compared.
            figures: What the recipe has learnt, by name.

        Returns:
            What ``result.json`` holds; of a rank that does not speak, the figures.
        """
        if not self._speaks:
            return dict(figures)
        return _write_end(self.guard, self.options.run_dir, figures, weights=digest(model))


def _write_end(
    guard: Guard, run_dir: Path, figures: Mapping[str, Any], **more: str
) -> dict[str, Any]:
    """Write ``result.json`` and ``report.html``, and print the figures."""
    result: dict[str, Any] = {
        "global_step": guard.global_step,
        "stopped": guard.stop_reason,
        **more,
    }
    result |= {"figures": dict(figures), "statistics": dataclasses.asdict(guard.statistics())}
    replace_file(run_dir / "result.json", json.dumps(result, indent=2, default=str).encode())
    for name, value in figures.items():
        if isinstance(value, (list, dict)) and name != "found":  # such as a curve: for programs
            continue
        print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
    weights = f"weights {more['weights'][:16]}; " if "weights" in more else ""
    print(f"step {guard.global_step}; {weights}records in {run_dir}")
    page = run_dir / "report.html"
    try:
        replace_file(page, render(gather(check_run(run_dir))).encode())
        print(f"report: {page}")
    except HoldfastError as error:  # no plotly: the run itself is whole
        print(f"no report: {error.what}. {error.fix}", file=sys.stderr)
    except (MemoryError, OSError) as error:  # likewise
        print(f"no report: {error!r}. `holdfast report {run_dir}` makes it.", file=sys.stderr)
    return result


def found(guard: Guard) -> list[str]:
    """Return what was found to be wrong, in the order of finding.

    Rules, events of bad samples and workers, and what the diagnosis only says on request.

    Workers that were replaced because the signal that ended the run came to them first are not
    among it.
    """
    names = (
        event.data["rule"] if event.kind in ("finding", "preflight") else event.kind
        for event in guard.events()
        if event.kind in _TELLING
        and not (guard.stop_reason and guard.stop_reason in str(event.data.get("cause")))
    )
    asked = (finding.rule for finding in guard.diagnose() if finding.severity != "note")
    return list(dict.fromkeys([*names, *asked]))


def digest(model: torch.nn.Module) -> str:
    """Return the SHA-256 of a model's state, by name and by bit."""
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        found.update(name.encode())
        found.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
