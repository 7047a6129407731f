"""Find out, before memory is short, whether splitting a batch leaves its gradient unchanged.

The loss of at most 4 samples is compared with the weighted losses of 3 and 1 of them: gradients that differ mean
that samples are coupled (in-batch negatives, a pairwise loss, a mean over something other than samples). If two
runs with different random numbers differ as much, the loss is random and nothing can be said.

On the CPU this runs in a forked copy of the process, so it can leave no trace: no random number, no counter of the
caller's, no buffer. With an accelerator a fork is not possible; there it runs in place, only when a split is about
to be made, and random state, buffers, gradients and modes are put back.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn

from holdfast.data.random_state import seed_cpu
from holdfast.data.splitting import Split, batch_size, copied, micro_batches, tensors_in, versions_of
from holdfast.run.loss import read_loss

_SAMPLES = 4
_PART = 3
# Rounding of 3 + 1 against 4 samples stays below 1e-5 in fp32; coupled losses differ by 0.01 and more.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_HALF_TOLERANCE = 5e-2
_TIMEOUT_SECONDS = 60.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a rehearsal has shown.

    Args:
        outcome: ``"exact"``: splitting keeps the gradient. ``"coupled"``: it does not. ``"random"``: the loss
            draws random numbers, so splitting is equal in distribution at best. ``"unknown"``: it could not
            be tried.
        difference: Relative L2 difference of the gradients; NaN if unknown.
        declared: The loss function says how many items its mean is over.
        changes_batch: The loss function changes the tensors of its batch.
        why: For ``"unknown"``, what went wrong.
    """

    outcome: Literal["exact", "coupled", "random", "unknown"]
    difference: float = float("nan")
    declared: bool = False
    changes_batch: bool = False
    why: str = ""


def rehearse(
    batch: Any,
    size: int,
    split: Split,
    loss_fn: Callable[[Any], Any],
    models: Sequence[nn.Module],
    parameters: Sequence[torch.Tensor],
) -> Verdict:
    """Compare 4 samples with 3 + 1 of them, in this process.

    Args:
        batch: A batch of at least 2 samples; its first 4 are used, copied.
        size: Its samples.
        split: How it is cut.
        loss_fn: As given to ``Guard.step``.
        models: Switched to evaluation, so that dropout does not hide the answer, and back.
        parameters: Whose gradients are compared; their ``.grad`` is overwritten and emptied.
    """
    few = min(_SAMPLES, size)
    head = copied(micro_batches(batch, size, few, split)[0][0])
    few = batch_size(head, split)
    tensors = tensors_in(head)
    versions = versions_of(tensors)
    parts = micro_batches(head, few, min(_PART, few - 1), split)
    with _evaluating(models), torch.enable_grad():
        seed_cpu(0)
        declared = _accumulate([(head, few)], 1.0, loss_fn, parameters)
        changes = versions_of(tensors) != versions
        whole = _norm(parameters)
        if changes:
            return Verdict(outcome="unknown", changes_batch=True, declared=declared, why="it changes its batch")
        seed_cpu(0)
        _accumulate(parts, -1.0, loss_fn, parameters)
        difference = _norm(parameters) / whole if whole else 0.0
        outcome: Literal["exact", "coupled", "random"] = "exact"
        tolerance = min(_TOLERANCE.get(p.dtype, _HALF_TOLERANCE) for p in parameters)
        if not difference <= tolerance:
            _clear(parameters)
            _accumulate([(head, few)], 1.0, loss_fn, parameters)
            seed_cpu(1)
            _accumulate([(head, few)], -1.0, loss_fn, parameters)
            outcome = "coupled" if _norm(parameters) <= tolerance * whole else "random"
    _clear(parameters)
    return Verdict(outcome=outcome, difference=difference, declared=declared)


def _accumulate(
    parts: Sequence[tuple[Any, int]],
    sign: float,
    loss_fn: Callable[[Any], Any],
    parameters: Sequence[torch.Tensor],
) -> bool:
    """Add the gradient of the mean over these parts to ``.grad``; return whether items were declared."""
    means, items, declared = [], [], False
    for part, samples in parts:
        mean, count, declared = read_loss(loss_fn(part), samples)
        means.append(mean)
        items.append(float(count))
    for mean, count in zip(means, items, strict=True):
        if count:
            (sign * count / sum(items) * mean).backward(inputs=list(parameters))  # type: ignore[no-untyped-call]
    return declared


def _norm(parameters: Sequence[torch.Tensor]) -> float:
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms = [torch.linalg.vector_norm(g.to_dense(), dtype=torch.float32).cpu() for g in gradients]
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0


def _clear(parameters: Sequence[torch.Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None


@contextlib.contextmanager
def _evaluating(models: Sequence[nn.Module]) -> Iterator[None]:
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
