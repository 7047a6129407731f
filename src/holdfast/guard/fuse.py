"""Whether an optimizer may update many tensors at once: tried once, on copies, when the run is some steps old.

torch has up to three implementations of one optimizer. ``foreach`` computes as the plain one does and mostly gives
the same bits; ``fused`` rounds otherwise. What is faster and gives the same bits is switched on; what is only faster
is proposed.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.optim import Optimizer

from holdfast.core.events import run_events
from holdfast.guard.parts import Parts
from holdfast.guard.record import RunRecord, described
from holdfast.numerics.eager import anything_compiled

_AT_STEP = 10  # kernels are warm, and nobody waits for an answer
_MOST_BYTES = 16 * 2**20  # of parameters that are copied, with gradients and moments
_ROUNDS = 6
_WORTH = 1.1  # times as fast, below which nothing is said
# Those whose foreach had the plain one's bits in 25 steps of 60 random settings each. That of NAdam, RAdam and ASGD
# orders its operations otherwise: equal for small models and rates, by chance.
_COMPUTES_ALIKE = ("Adam", "AdamW", "SGD", "Adagrad", "Adadelta", "Adamax", "RMSprop", "Rprop")


class Fusing:
    """Tries the implementations of each optimizer of a run, once."""

    def __init__(self, parts: Parts, record: RunRecord) -> None:
        self._parts, self._record = parts, record
        self._left = {name for name, each in parts.optimizers.items() if _is_plain(each)}

    def stepped(self, name: str, step: int) -> None:
        """Try an optimizer out that has just stepped, and whose gradients are still there. Never raises."""
        if step < _AT_STEP or name not in self._left:
            return
        self._left.discard(name)
        try:
            self._try(name, self._parts.optimizers[name])
        except Exception as error:  # noqa: BLE001 - an optimizer that cannot be copied, no memory: it stays as it is
            self._record.emit(run_events.OptimizerNotTried(optimizer=name, error=described(error)))

    def _try(self, name: str, optimizer: Optimizer) -> None:
        if self._parts.compiled or anything_compiled():
            return
        now, seconds, share = _run(optimizer, {})
        ways = [way for way in ("foreach", "fused") if all(way in group for group in optimizer.param_groups)]
        for way in ways:
            tensors, took, _ = _run(optimizer, {"foreach": False, "fused": False, way: True})
            facts: dict[str, Any] = {
                "optimizer": name,
                "implementation": way,
                "times_as_fast": round(seconds / took, 2),
                "saved_milliseconds": round(1000 * (seconds - took) / share, 3),
            }
            # A kernel that multiplies and adds in one rounding is equal for some numbers, by chance.
            computes_alike = way == "foreach" and type(optimizer).__name__ in _COMPUTES_ALIKE
            same = computes_alike and all(map(torch.equal, tensors, now))
            if seconds < _WORTH * took:
                continue
            if same:
                for group in optimizer.param_groups:
                    group["foreach"] = True
                self._record.emit(run_events.OptimizerFused(**facts))
            else:
                fix = f"pass {way}=True to {type(optimizer).__name__} yourself: equal up to rounding"
                self._record.emit(run_events.OptimizerCouldBeFaster(**facts, fix=fix))


def _is_plain(optimizer: Optimizer) -> bool:
    """Say whether this is torch's own, and nobody has chosen an implementation."""
    chosen = ("foreach", "fused", "capturable", "differentiable")
    free = not any(group.get(key) for group in optimizer.param_groups for key in chosen)
    return type(optimizer).__module__.startswith("torch.optim.") and free


def _run(optimizer: Optimizer, flags: dict[str, bool]) -> tuple[list[torch.Tensor], float, float]:
    """Let a copy make some steps; return its tensors after them, the seconds of one, and which share was copied."""
    copies: dict[torch.Tensor, torch.Tensor] = {}
    groups, left = [], _MOST_BYTES
    for group in optimizer.param_groups:
        some = []
        for p in group["params"]:
            if p.grad is not None and p.nbytes <= left:
                left -= p.nbytes
                copies[p] = p.detach().clone().requires_grad_()
                some.append(copies[p])
        if some:
            groups.append({**group, "params": some, **{key: value for key, value in flags.items() if key in group}})
    trial = type(optimizer)(groups)  # type: ignore[call-arg] # torch's own: what they need is in the groups
    for p, copy in copies.items():
        state = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in optimizer.state[p].items()}
        if flags.get("fused") and isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].to(copy.device, torch.float32)
        trial.state[copy] = state
    # Past the hooks that others have on every step of every optimizer.
    step = getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)
    times = []
    for _ in range(_ROUNDS):
        for p, copy in copies.items():
            copy.grad = p.grad.clone()  # type: ignore[union-attr] # SGD's foreach changes them
        started = time.perf_counter()
        step(trial)
        for device in {copy.device for copy in copies.values() if copy.device.type != "cpu"}:
            torch.get_device_module(device).synchronize(device)
        times.append(time.perf_counter() - started)
    moments = [v for copy in copies for v in trial.state[copies[copy]].values() if isinstance(v, torch.Tensor)]
    bytes_in_all = sum(p.nbytes for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    share = (_MOST_BYTES - left) / bytes_in_all
    tensors = [t.detach() for t in (*copies.values(), *moments) if t.dim()]
    return tensors, min(times[1:]), share
