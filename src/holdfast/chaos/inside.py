"""Inside each Python process of a command that is put to the test: a trace of its steps, and the fault at its moment.

Started by ``injected/sitecustomize.py`` of ``supervise``. The trace is a file of JSON lines, one for each step, save
and evaluation, written at once, so that it survives SIGKILL. Torch is not imported, only waited for.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any

from holdfast.chaos.digests import Digests
from holdfast.chaos.injecting import Injector, own_rank
from holdfast.core.importing import ImportWatch

_SAVERS = {
    "torch.serialization": "save",
    "safetensors.torch": "save_file",
    "torch.distributed.checkpoint.state_dict_saver": "save",
    "holdfast.checkpoint.saver": "write",
}
_WRITES = os.O_WRONLY | os.O_RDWR
_SETTINGS = ("lr", "momentum", "betas", "weight_decay")
_SEEN_NUMBERS = 4  # of each of the first parameters: to find out which state is the nearest
_inside: Inside | None = None


def start(run: str) -> None:
    """Begin in this process, once. `run` is the directory of the traces of this attempt."""
    global _inside
    if _inside is None and Path(run).is_dir():
        _inside = Inside(Path(run))


class Inside:
    """Traces this process and those that are forked from it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.fault = Injector(folder, self.write)
        self._roots = tuple(self.fault.plan.get("inside", ()))
        self._begin()
        self._watch = ImportWatch(self.failed)
        self._watch.when_imported("torch", self._on_torch)
        os.register_at_fork(after_in_child=self._begin)
        sys.addaudithook(self._audit)

    def _begin(self) -> None:
        self._file: int | None = None
        self.steps = self._saves = self._evaluations = 0
        self._seen: set[str] = set()
        self._written: set[str] = set()
        self._loaded: str | None = None
        self._inputs: list[tuple[str | None, str | None]] = []
        self._losses: list[Any] = []
        self._random: dict[str, str] | None = None
        self._before: dict[str, Any] | None = None
        self._after: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._backwards = self._depth = 0
        self._first: dict[int, str] = {}
        self._scale: float | None = None
        self._busy = False

    # --- the trace ------------------------------------------------------------------------------------------------

    def write(self, kind: str, **facts: Any) -> None:
        """Add a line to the trace of this process."""
        if self._file is None:
            name = f"{time.time_ns()}-{os.getpid()}.jsonl"
            self._file = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self.write("start", rank=own_rank(), ranks=int(os.environ.get("WORLD_SIZE", "1")))
        line = {"kind": kind, "step": self.steps, "seconds": time.time(), **facts}
        os.write(self._file, json.dumps(line).encode() + b"\n")

    def failed(self, error: BaseException) -> None:
        """Note an error of ours; the training goes on."""
        with suppress(OSError), (self._folder / "failed.txt").open("a") as file:
            file.writelines(traceback.format_exception(error))

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or (self._file is None and "torch" not in sys.modules):
            return
        path, _, flags = arguments
        if self._busy or not (isinstance(flags, int) and flags & _WRITES) or not isinstance(path, (str, bytes)):
            return
        with suppress(OSError, ValueError):
            self._wrote(os.path.realpath(os.fsdecode(path)))

    def _wrote(self, path: str) -> None:
        self._busy = True
        if path not in self._written and not path.startswith((*self._roots, str(self._folder))):
            self._written.add(path)
            self.write("outside", path=path)
        self._busy = False

    # --- hooks in torch -------------------------------------------------------------------------------------------

    def _on_torch(self, torch: Any) -> None:
        self._torch, self._digests = torch, Digests(torch)
        self._hooked: Any = weakref.WeakSet()
        acts: dict[str, Callable[[Any], None]] = {
            "torch.optim.optimizer": self._on_optimizers,
            "torch.autograd": lambda module: self._wrap(module, "backward", self._backward),
            "torch.amp.grad_scaler": lambda module: self._wrap(module.GradScaler, "step", self._scaler_step),
            "torch.nn.modules.module": lambda module: self._wrap(module.Module, "eval", self._eval),
            "torch.utils.data.dataloader": lambda module: self._wrap(
                module._BaseDataLoaderIter, "__next__", self._next
            ),
            "holdfast.loader.loader": lambda module: self._wrap(module.Epoch, "__next__", self._next),
            **{name: partial(self._on_saver, function) for name, function in _SAVERS.items()},
        }
        for name, act in acts.items():
            self._watch.when_imported(name, act)

    def _wrap(self, owner: Any, name: str, act: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self._torch.compiler.is_dynamo_compiling():
                return original(*args, **kwargs)
            return act(original, *args, **kwargs)

        setattr(owner, name, wrapped)

    def _noted(self, act: Callable[..., Any], *args: Any) -> Any:
        try:
            return act(*args)
        except Exception as error:  # noqa: BLE001 - nothing of ours may stop the script
            self.failed(error)
            return None

    def _on_saver(self, function: str, module: Any) -> None:
        self._wrap(module, function, self._save)
        if module.__name__ == "torch.serialization":
            self._torch.save = module.save

    def _on_optimizers(self, module: Any) -> None:
        self._wrap(module.Optimizer, "__init__", self._make_optimizer)
        module.register_optimizer_step_pre_hook(lambda optimizer, *_: self._noted(self._step_begins, optimizer))
        module.register_optimizer_step_post_hook(lambda optimizer, *_: self._noted(self._step_ends, optimizer))

    def _make_optimizer(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        for root in self._noted(self._digests.roots, optimizer) or ():
            if root not in self._hooked:
                self._hooked.add(root)
                root.register_forward_pre_hook(self._forward, with_kwargs=True)

    # --- what a step sees -----------------------------------------------------------------------------------------

    def _next(self, original: Callable[..., Any], iterator: Any) -> Any:
        batch = original(iterator)
        if self._torch.is_grad_enabled():
            batch = self.fault.batch(self._torch, batch, self.steps, "loader")
            self._loaded = self._noted(self._digests.tree, batch)
            if self.steps and not self._seen & {"workers"} and self.fault.workers():
                self._seen.add("workers")
                self.write("workers")
        return batch

    def _forward(self, module: Any, args: Any, kwargs: Any) -> Any:
        if not (module.training and self._torch.is_grad_enabled()) or self._torch.compiler.is_dynamo_compiling():
            return None
        args, kwargs = self.fault.batch(self._torch, (args, kwargs), self.steps, "forward")
        if id(module) not in self._first:
            self._first[id(module)] = self._noted(self._buffers, module)
        self._noted(self._enters, (args, kwargs))
        return args, kwargs

    def _enters(self, inputs: Any) -> None:
        if self._random is None:
            self._random = self._digests.random_state()
        self._inputs.append((self._loaded, self._digests.tree(inputs)))

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._depth:
            return original(*args, **kwargs)
        self._noted(self._backward_begins, args[0] if args else kwargs.get("tensors"))
        self.fault.meet("backward", self.steps)
        self._depth += 1
        try:
            return original(*args, **kwargs)
        finally:
            self._depth -= 1

    def _backward_begins(self, root: Any) -> None:
        root = root[0] if isinstance(root, (tuple, list)) and root else root
        self._backwards += 1
        if self._random is None:
            self._random = self._digests.random_state()
        if not self._inputs and self._loaded is not None:
            self._inputs.append((self._loaded, None))
        if isinstance(root, self._torch.Tensor) and root.numel() == 1:
            self._losses.append(root.item())

    def _scaler_step(self, original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
        self._scale = self._noted(scaler.get_scale)
        return original(scaler, *args, **kwargs)

    def _buffers(self, root: Any) -> str:
        return self._digests.tensors(root.named_buffers())

    def _state(self, optimizer: Any, first: dict[int, str] | None = None) -> dict[str, Any]:
        """Return digests of what an optimizer trains; `first` are those of buffers before anything was computed."""
        roots = self._held(optimizer)
        parameters = [(f"{n}.{name}", p) for n, root in enumerate(roots) for name, p in root.named_parameters()]
        if not roots:
            parameters = [(f"{n:04}", p) for group in optimizer.param_groups for n, p in enumerate(group["params"])]
        numbers: list[float] = []
        for _, parameter in parameters[:8]:
            local = getattr(parameter, "_local_tensor", parameter).detach()
            numbers += local.reshape(-1)[:_SEEN_NUMBERS].double().tolist()
        return {
            "weights": self._digests.tensors(parameters),
            "buffers": [self._buffers(root) if first is None else first.get(id(root)) for root in roots],
            "optimizer": self._digests.optimizer(optimizer),
            "numbers": numbers,
            "holds": " ".join(type(root).__name__ for root in roots) + str(len(parameters)),
        }

    def _held(self, optimizer: Any) -> list[Any]:
        found = self._after.get(id(optimizer))
        roots: list[Any] = [root() for root in found[0]] if found else [None]
        if any(root is None for root in roots):
            roots = self._digests.roots(optimizer)
            self._after[id(optimizer)] = ([weakref.ref(root) for root in roots], {})
        return roots

    def _is_for_state(self, optimizer: Any) -> bool:
        """Return whether this step only makes the state of its optimizer, as some do before they load one."""
        if self._backwards:
            return False
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        rates = [float(group.get("lr", 1.0)) for group in optimizer.param_groups]
        return not any(rates) or not any(bool(gradient.any()) for gradient in gradients)

    def _step_begins(self, optimizer: Any) -> None:
        self._skips = self._is_for_state(optimizer)
        if self._skips:
            return
        known = self._after.get(id(optimizer))
        self.fault.meet("before", self.steps)
        self._before = None if known and known[1] else self._state(optimizer, self._first)
        groups = optimizer.param_groups
        self._hyper = [[repr(group[name]) for name in _SETTINGS if name in group] for group in groups]

    def _step_ends(self, optimizer: Any) -> None:
        if self._skips:
            return
        after = self._state(optimizer)
        self._after[id(optimizer)] = (self._after[id(optimizer)][0], after)
        self.steps += 1
        self.write(
            "step", before=self._before, after=after, settings=self._hyper, scale=self._scale, inputs=self._inputs,
            losses=self._losses, random=self._random, which=list(self._after).index(id(optimizer)),
        )  # fmt: skip
        self._inputs, self._losses, self._random, self._backwards = [], [], None, 0
        self.fault.meet("after", self.steps)

    # --- saving, evaluating ---------------------------------------------------------------------------------------

    def _eval(self, original: Callable[..., Any], module: Any) -> Any:
        result = original(module)
        if self.steps:
            self._evaluations += 1
            self._noted(partial(self.write, "eval", number=self._evaluations))
            self.fault.meet("eval", self._evaluations)
        return result

    def _save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if "saving" in self._seen or not self.steps:
            return original(*args, **kwargs)
        self._seen.add("saving")
        self._saves += 1
        self.fault.meet("save begins", self._saves)
        began = time.time()
        try:
            result = original(*args, **kwargs)
        finally:
            self._seen.discard("saving")
            self.fault.save_ends()
        self._noted(self._saved, began, args, kwargs)
        self.fault.meet("save ends", self._saves)
        return result

    def _saved(self, began: float, args: Any, kwargs: Any) -> None:
        path = next((each for each in (*args, *kwargs.values()) if isinstance(each, (str, os.PathLike))), None)
        value = args[0] if args else kwargs.get("obj")
        entries = {} if isinstance(value, (str, os.PathLike)) else self._digests.saved(value)
        where = None if path is None else os.path.realpath(path)
        size = os.stat(where).st_size if where is not None and os.path.isfile(where) else 0  # noqa: PTH113, PTH116
        self.write("save", number=self._saves, path=where, entries=entries, began=began, bytes=size)
        if where is not None:
            self._wrote(where)
