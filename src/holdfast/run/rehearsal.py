"""Find out, before memory is short, whether splitting a batch leaves its gradient unchanged.

The loss of 4 samples is compared with the weighted losses of 3 and 1 of them: gradients that differ mean that
samples are coupled (in-batch negatives, a pairwise loss, a mean over something other than samples). If two runs with
different random numbers differ as much, the loss is random and nothing can be said. One batch proves nothing about
the next (its sentences may all be of one length), so this is repeated while batches are split (see ``promises``).

On the CPU this runs in a forked copy of the process, so it leaves no trace in this one: no random number, no
counter of the caller's, no buffer. With an accelerator a fork is not possible; there it runs in place, only when a
split is about to be made, and random state, buffers, gradients and modes are put back.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import select
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from holdfast.data.random_state import seed_cpu
from holdfast.data.splitting import Split, batch_size, copied, micro_batches, tensors_in, versions_of
from holdfast.memory.oom import find_out_of_memory, let_go
from holdfast.run.loss import read_loss

_SAMPLES = 4
# Rounding of 3 + 1 against 4 samples stays below 1e-5 in fp32; coupled losses differ by 0.01 and more.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_HALF_TOLERANCE = 5e-2
_TIMEOUT_SECONDS = 60.0
_PR_SET_PDEATHSIG = 1
Outcome: TypeAlias = Literal["exact", "coupled", "random", "trusted", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a rehearsal has shown.

    Args:
        outcome: ``"exact"``: splitting keeps the gradient. ``"coupled"``: it does not. ``"random"``: the loss
            draws random numbers, so splitting is equal in distribution at best. ``"trusted"``: the caller says
            that it is exact. ``"unknown"``: it could not be tried.
        difference: Relative L2 difference of the gradients; NaN if unknown.
        declared: The loss function says how many items its mean is over.
        changes_batch: The loss function changes the tensors of its batch.
        changed_buffer: Name of a buffer, other than running statistics, that a forward pass changes.
        why: For ``"unknown"``, what went wrong.
    """

    outcome: Outcome
    difference: float = float("nan")
    declared: bool = False
    changes_batch: bool = False
    changed_buffer: str = ""
    why: str = ""


def rehearse(
    batch: Any,
    size: int,
    split: Split,
    loss_fn: Callable[[Any], Any],
    models: Mapping[str, nn.Module],
    parameters: Sequence[torch.Tensor],
    *,
    rounds_to_half: bool,
) -> Verdict:
    """Compare samples from the beginning and from the end of a batch, whole and in parts, in this process.

    Args:
        batch: A batch of at least 2 samples.
        size: Its samples.
        split: How it is cut.
        loss_fn: As given to ``Guard.step``. It is given copies.
        models: Run once in training, to see which buffers change; then in evaluation, so that dropout does not
            hide the answer.
        parameters: Whose gradients are compared; their ``.grad`` is overwritten and emptied.
        rounds_to_half: Whether the loss function runs under autocast.
    """
    windows = [window for window, samples in micro_batches(batch, size, min(_SAMPLES, size), split) if samples > 1]
    tolerances = [_HALF_TOLERANCE if rounds_to_half else _TOLERANCE.get(p.dtype, _HALF_TOLERANCE) for p in parameters]
    changed_buffer = _find_changed_buffer(models, loss_fn, windows[0])
    with _evaluating(models.values()), torch.enable_grad():
        ends = [windows[0], *windows[1:][-1:]]
        found = [_compare_if_it_fits(window, split, loss_fn, parameters, min(tolerances)) for window in ends]
    return replace(worst(found), changed_buffer=changed_buffer)


def _compare_if_it_fits(
    head: Any, split: Split, loss_fn: Callable[[Any], Any], parameters: Sequence[torch.Tensor], tolerance: float
) -> Verdict:
    """Compare gradients of 4 samples, else of 2, else only their losses, which needs far less memory."""
    pair = micro_batches(head, batch_size(head, split), 2, split)[0][0]
    tries: list[Callable[[], Verdict]] = [
        lambda: _compare(head, split, loss_fn, parameters, tolerance),
        lambda: _compare(pair, split, loss_fn, parameters, tolerance),
        lambda: _compare_losses(pair, split, loss_fn, tolerance),
    ]
    for number, compare in enumerate(tries, start=1):
        try:
            return compare()
        except Exception as error:
            if find_out_of_memory(error) is None or number == len(tries):
                raise
            failure = error
        let_go(failure)
        _clear(parameters)
    raise AssertionError


def _compare_losses(head: Any, split: Split, loss_fn: Callable[[Any], Any], tolerance: float) -> Verdict:
    """Compare the loss itself: if samples are coupled, its value differs too, but for rare constructions."""
    few = batch_size(head, split)

    def mean_over(parts: Sequence[tuple[Any, int]], seed: int) -> float:
        seed_cpu(seed)
        with torch.no_grad():
            read = [_call(loss_fn, part, samples, needs_graph=False)[0] for part, samples in parts]
        items = [float(count) for _, count, _ in read]
        return sum(float(mean) * count for (mean, _, _), count in zip(read, items, strict=True) if count) / sum(items)

    whole = mean_over([(head, few)], 0)
    difference = abs(mean_over(micro_batches(head, few, few - 1, split), 0) - whole) / (abs(whole) or 1.0)
    _, changes = _call(loss_fn, head, few, needs_graph=False)
    if not math.isfinite(difference):
        return Verdict(outcome="unknown", changes_batch=changes, why="its loss is not finite")
    outcome: Outcome = "exact"
    if difference > tolerance:
        random = abs(mean_over([(head, few)], 1) - whole) > tolerance * abs(whole)
        outcome = "random" if random else "coupled"
    return Verdict(outcome=outcome, difference=difference, changes_batch=changes)


def _call(
    loss_fn: Callable[[Any], Any], part: Any, samples: int, *, needs_graph: bool = True
) -> tuple[tuple[torch.Tensor, Any, bool], bool]:
    """Return what the loss function says about a copy, and whether it has changed the copy."""
    given = copied(part)
    tensors = tensors_in(given)
    versions = versions_of(tensors)
    read = read_loss(loss_fn(given), samples, needs_graph=needs_graph)
    return read, versions_of(tensors) != versions


def _find_changed_buffer(models: Mapping[str, nn.Module], loss_fn: Callable[[Any], Any], head: Any) -> str:
    """Return the name of a buffer, other than running statistics, that a forward pass changes, or ""."""
    buffers = {
        f"{name}.{key}" if len(models) > 1 else key: buffer
        for name, model in models.items()
        for prefix, module in model.named_modules()
        if not isinstance(module, _NormBase)
        for key, buffer in module.named_buffers(prefix, recurse=False)
    }
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    if before:
        try:
            with torch.no_grad():
                loss_fn(copied(head))
        except Exception as error:
            if find_out_of_memory(error) is None:
                raise
    now = {name: buffer for model in models.values() for name, buffer in model.named_buffers()}
    for name, buffer in buffers.items():
        if now.get(name, buffer) is not buffer or not torch.equal(before[name].nan_to_num(), buffer.nan_to_num()):
            return name
    return ""


def _compare(
    head: Any, split: Split, loss_fn: Callable[[Any], Any], parameters: Sequence[torch.Tensor], tolerance: float
) -> Verdict:
    """Compare the loss of these samples with the weighted losses of all but one and of the last one."""
    few = batch_size(head, split)
    parts = micro_batches(head, few, few - 1, split)
    _clear(parameters)
    seed_cpu(0)
    declared, changes = _accumulate([(head, few)], 1.0, loss_fn, parameters)
    whole = _norm(parameters)
    seed_cpu(0)
    _accumulate(parts, -1.0, loss_fn, parameters)
    difference = _norm(parameters) / whole if whole else 0.0
    outcome: Outcome = "exact"
    if not math.isfinite(whole) or not math.isfinite(difference):
        _clear(parameters)
        return Verdict(outcome="unknown", declared=declared, changes_batch=changes, why="its gradient is not finite")
    if difference > tolerance:
        _clear(parameters)
        _accumulate([(head, few)], 1.0, loss_fn, parameters)
        seed_cpu(1)
        _accumulate([(head, few)], -1.0, loss_fn, parameters)
        outcome = "coupled" if _norm(parameters) <= tolerance * whole else "random"
    _clear(parameters)
    return Verdict(outcome=outcome, difference=difference, declared=declared, changes_batch=changes)


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict that promises least; an unknown one yields to any other."""
    order = ("unknown", "exact", "random", "coupled")
    chosen = max(verdicts, key=lambda verdict: order.index(verdict.outcome))
    return replace(
        chosen,
        changes_batch=any(verdict.changes_batch for verdict in verdicts),
        changed_buffer=next((verdict.changed_buffer for verdict in verdicts if verdict.changed_buffer), ""),
    )


def _accumulate(
    parts: Sequence[tuple[Any, int]],
    sign: float,
    loss_fn: Callable[[Any], Any],
    parameters: Sequence[torch.Tensor],
) -> tuple[bool, bool]:
    """Add the gradient of the mean over these parts to ``.grad``.

    Returns:
        Whether items were declared, and whether the loss function changed the tensors that it was given.
    """
    means, items, declared, changes = [], [], False, False
    for part, samples in parts:
        (mean, count, declared), changed = _call(loss_fn, part, samples)
        changes = changes or changed
        means.append(mean)
        items.append(float(count))
    for mean, count in zip(means, items, strict=True):
        if count:
            (sign * count / sum(items) * mean).backward(inputs=list(parameters))  # type: ignore[no-untyped-call]
    return declared, changes


def _norm(parameters: Sequence[torch.Tensor]) -> float:
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms = [torch.linalg.vector_norm(_wide(g.to_dense())).double().cpu() for g in gradients]
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0


def _wide(gradient: torch.Tensor) -> torch.Tensor:
    return gradient if gradient.dtype in _TOLERANCE else gradient.float()


def _clear(parameters: Sequence[torch.Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None


@contextlib.contextmanager
def _evaluating(models: Iterable[nn.Module]) -> Iterator[None]:
    modules = [module for model in models for module in model.modules()]
    modes = [module.training for module in modules]
    dropout = {module: module.dropout for module in modules if isinstance(module, nn.RNNBase)}
    try:
        for module in modules:
            # cuDNN refuses the backward of a recurrent layer in evaluation: only its dropout goes.
            module.training = module in dropout
        for module in dropout:
            module.dropout = 0.0
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        for module, rate in dropout.items():
            module.dropout = rate


def in_a_copy_of_this_process(run: Callable[[], Verdict]) -> Verdict:
    """Fork, run there, and return what the copy has found.

    The copy uses one thread (OpenMP's others do not survive a fork), says nothing, and is killed when it takes
    longer than a minute or when its parent dies.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on forking with threads
        try:
            child = os.fork()
        except OSError as error:
            os.close(reading)
            os.close(writing)
            return Verdict(outcome="unknown", why=f"cannot fork ({error})")
    if child == 0:
        _be_the_copy(run, writing)
    os.close(writing)
    try:
        answer = _read_answer(reading)
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if not answer:
        return Verdict(outcome="unknown", why="the rehearsal gave no answer")
    return Verdict(**json.loads(answer))


def _read_answer(reading: int) -> bytes:
    ready, _, _ = select.select([reading], [], [], _TIMEOUT_SECONDS)
    return os.read(reading, 65536) if ready else b""


def _be_the_copy(run: Callable[[], Verdict], writing: int) -> None:
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        libc = ctypes.CDLL(None)
        if hasattr(libc, "prctl"):
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        torch.set_num_threads(1)
        verdict = attempted(run)
        os.write(writing, json.dumps(asdict(verdict)).encode())
    finally:
        os._exit(0)


def attempted(run: Callable[[], Verdict]) -> Verdict:
    """Return the verdict, or say why there is none."""
    try:
        return run()
    except Exception as error:  # noqa: BLE001 - whatever the caller's loss does with 3 samples is an answer
        first = (str(error).strip().splitlines() or [""])[0]
        return Verdict(outcome="unknown", why=f"{type(error).__name__}: {first}"[:300])
