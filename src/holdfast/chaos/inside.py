"""Inside each Python process of a command that is put to the test.

A trace of its steps, and the fault at its moment.

Started by ``injected/sitecustomize.py`` of ``supervise``. The trace is a file of JSON lines, one
for each step, save and evaluation, written at once, so that it survives SIGKILL. Torch is not
imported, only waited for.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import platform
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial, wraps
from pathlib import Path
from types import FrameType
from typing import Any

from holdfast.chaos.digests import Digests
from holdfast.chaos.injecting import Injector, own_rank
from holdfast.core.importing import ImportWatch
from holdfast.core.vector_functions import settle_vector_functions

_SAVERS = {
    "torch.serialization": "save",
    "safetensors.torch": "save_file",
    "torch.distributed.checkpoint.state_dict_saver": "save",
    "holdfast.checkpoint.saver": "write",
}
_HANDLED = tuple(
    signal.Signals[f"SIG{name}"] for name in ("CHLD", "TERM", "INT", "HUP", "USR1", "USR2", "ALRM")
)
_WRITES = os.O_WRONLY | os.O_RDWR
# Events of audit, with the places of their paths; after these a descriptor of a folder, or -1,
# comes last.
_CHANGES = {
    "os.remove": (0,),
    "os.rename": (0, 1),
    "os.rmdir": (0,),
    "shutil.rmtree": (0,),
    "os.symlink": (1,),
    "os.link": (1,),
    "os.mkdir": (0,),
}
_SETTINGS = ("lr", "momentum", "betas", "weight_decay")
_CALL = "call seen by holdfast chaos"
_SEEN_NUMBERS = 4  # of each of the first parameters: to find out which state is the nearest
_inside: Inside | None = None


def start(run: str) -> None:
    """Begin in this process, once. `run` is the directory of the traces of this attempt."""
    global _inside
    if _inside is None and Path(run).is_dir():
        _inside = Inside(Path(run))


def _enter(module: Any, args: Any, kwargs: Any) -> Any:
    """Be the hook of a model: a function of a module can be copied and pickled with it."""
    return None if _inside is None else _inside.forward(module, args, kwargs)


def _leave(module: Any, _args: Any, output: Any) -> None:
    """Be its hook when it has computed."""
    if _inside is not None:
        _inside.computed(module, output)


@contextmanager
def _handlers_wait() -> Iterator[None]:
    """Call the training's handlers of signals afterwards.

    One may raise, as torch's does when a worker has died.

    That error is for the training, and in the midst of ours a step would be missing in the trace.
    """
    met: list[tuple[int, FrameType | None]] = []
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {
            number: given for number in _HANDLED if callable(given := signal.getsignal(number))
        }
    try:
        for number in handlers:
            signal.signal(number, lambda *given: met.append(given))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for number, frame in met:
        handlers[number](number, frame)


class Inside:
    """Traces this process and those that are forked from it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._trace = folder, folder
        self._torch: Any = None
        self._made: list[Any] = []  # optimizers, weak references
        self.fault = Injector(folder, self.write)
        self._roots = tuple(f"{each}/" for each in (folder, *self.fault.plan.get("inside", ())))
        self._begin()
        self.fault.begin()
        self._watch = ImportWatch(self.failed)
        self._watch.when_imported("torch", self._on_torch)
        os.register_at_fork(after_in_child=self._begin)
        sys.addaudithook(self._audit)

    def _begin(self) -> None:
        self._file: int | None = None
        self.steps = self._saves = self._evaluations = self._backwards = 0
        self._in_backward = self._saving = self._has_workers = False
        self._written: set[str] = set()
        self._saved_to: set[str] = set()
        self._read: set[str] = set()
        self._loaded: str | None = None
        self._scale: float | None = None
        self._first: dict[int, str] = {}  # digests of buffers before the first forward, by module
        self._held: dict[int, list[Any]] = {}  # by optimizer, weak references
        self._optimizers: list[Any] = []  # those that have stepped
        self._calls = 0  # of models that train
        self._entered: dict[int, int] = {}  # calls that compute, by module
        self._begin_step()

    def _begin_step(self) -> None:
        # By the number of a model's call: its batch, its inputs, and the random states before it.
        self._parts: dict[int, tuple[str | None, str | None, dict[str, str]]] = {}
        # Calls that a loss was made of; others act in an environment, or have failed
        self._used: set[int] = set()
        self._losses: list[str] = []
        self._backwards, self._has_saved = 0, False

    # --- the trace
    # ------------------------------------------------------------------------

    def write(self, kind: str, **facts: Any) -> None:
        """Add a line to the trace of this process."""
        if self._file is not None and not self._is_ours():
            self._file = os.open(self._trace, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        if self._file is None:
            self._trace = self._folder / f"{time.time_ns()}-{os.getpid()}.jsonl"
            self._file = os.open(
                self._trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
            )
            versions = {
                "Python": platform.python_version(),
                "torch": str(getattr(self._torch, "__version__", "")),
            }
            self.write("start", versions=versions)
        line = {"kind": kind, "step": self.steps, "seconds": time.time(), **facts}
        self.fault.append(self._file, json.dumps(line).encode() + b"\n")

    def _is_ours(self) -> bool:
        """Return whether nobody has closed the file of the trace, and opened another by its
        number.
        """
        with suppress(OSError, TypeError):
            return os.path.samestat(os.fstat(self._file), self._trace.stat())  # type: ignore[arg-type]
        return False

    def failed(self, error: BaseException) -> None:
        """Note an error of ours; the training goes on."""
        with suppress(OSError), (self._folder / "failed.txt").open("a") as file:
            file.writelines(traceback.format_exception(error))

    def _noted(self, act: Callable[..., Any], *args: Any) -> Any:
        if self._torch is not None and self._torch.compiler.is_dynamo_compiling():
            return None
        with _handlers_wait():
            try:
                return act(*args)
            except Exception as error:  # noqa: BLE001 - nothing of ours may stop the script
                return self.failed(error)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            writes = isinstance(arguments[2], int) and arguments[2] & _WRITES
            paths = arguments[:1] if writes else ()
            if not (writes or self.steps) and isinstance(arguments[0], (str, os.PathLike)):
                path = os.fspath(arguments[0])
                below = not os.path.isabs(path) or path.startswith(self._roots)  # noqa: PTH117
                if below and path not in self._read:
                    self._noted(self._reads, path)
        elif event == "os.truncate":
            paths = arguments[:1]
        # A folder's descriptor: it was named before
        elif event in _CHANGES and arguments[-1] in (-1, None):
            paths = tuple(arguments[at] for at in _CHANGES[event])
        else:
            return
        for path in paths:
            if not isinstance(path, (str, bytes, os.PathLike)):
                continue
            if event == "os.mkdir" and os.path.isdir(path):  # noqa: PTH112
                continue
            self._noted(self._wrote, os.fsdecode(path))
        if event == "os.rename" and (source := os.path.realpath(paths[0])) in self._saved_to:
            self._saved_to.add(to := os.path.realpath(paths[1]))
            self._noted(partial(self.write, "moved", path=to, source=source))

    def _reads(self, path: Any) -> None:
        """Note a file that is newer than the trial, once, before the first step.

        The training has made it.
        """
        self._read.add(path)
        real = Path(os.path.realpath(path))
        if real.is_file() and real.stat().st_mtime > self.fault.plan.get("since", math.inf):
            self.write("read", path=str(real))

    def _wrote(self, path: str) -> None:
        path = os.path.realpath(path)
        if path not in self._written and not f"{path}/".startswith(self._roots):
            self._written.add(path)
            self.write("outside", path=path)

    # --- hooks in torch
    # ------------------------------------------------------------------------

    def _on_torch(self, torch: Any) -> None:
        self._torch, self._digests = torch, Digests(torch)
        # Else a difference may be torch's, not the training's
        self._noted(settle_vector_functions, torch)
        self._hooked: Any = weakref.WeakKeyDictionary()  # handles of the hooks of models
        acts: dict[str, Callable[[Any], None]] = {
            "torch.optim.optimizer": self._on_optimizers,
            "torch.autograd": self._on_autograd,
            "torch.jit": lambda module: self._wrap(module, "script", self._unhooked),
            "torch.amp.grad_scaler": lambda module: self._wrap(
                module.GradScaler, "step", self._scaler_step
            ),
            "torch.nn.modules.module": lambda module: self._wrap(module.Module, "eval", self._eval),
            "torch.utils.data.dataloader": lambda mod: self._wrap(
                mod._BaseDataLoaderIter, "__next__", self._next
            ),
            "holdfast.loader.loader": lambda module: self._wrap(
                module.Epoch, "__next__", self._next
            ),
            **{name: partial(self._on_saver, function) for name, function in _SAVERS.items()},
        }
        for name, act in acts.items():
            self._watch.when_imported(name, act)

    def _wrap(self, owner: Any, name: str, act: Callable[..., Any]) -> None:
        original, is_compiling = getattr(owner, name), self._torch.compiler.is_dynamo_compiling

        @wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if is_compiling() else act(original, *args, **kwargs)

        setattr(owner, name, wrapped)

    def _on_saver(self, function: str, module: Any) -> None:
        self._wrap(module, function, self._save)
        if module.__name__ == "torch.serialization":
            self._torch.save = module.save

    def _on_autograd(self, module: Any) -> None:
        for name in ("backward", "grad"):
            self._wrap(module, name, self._backward)

    def _on_optimizers(self, module: Any) -> None:
        self._wrap(module.Optimizer, "__init__", self._make_optimizer)
        module.register_optimizer_step_pre_hook(
            lambda *given: self._noted(self._step_begins, *given)
        )
        module.register_optimizer_step_post_hook(
            lambda *given: self._noted(self._step_ends, given[0])
        )

    def _make_optimizer(
        self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        original(optimizer, *args, **kwargs)
        self._noted(self._watch_inputs, optimizer)

    def _watch_inputs(self, optimizer: Any) -> None:
        self._made.append(weakref.ref(optimizer))
        for root in self._digests.roots(optimizer):
            if root not in self._hooked:
                self._hook(root)

    def _hook(self, root: Any) -> None:
        # In that order at any time
        entering = root.register_forward_pre_hook(_enter, with_kwargs=True, prepend=True)
        self._hooked[root] = entering, root.register_forward_hook(_leave, prepend=True)

    # --- what a step sees
    # ------------------------------------------------------------------------

    def _next(self, original: Callable[..., Any], iterator: Any) -> Any:
        batch = original(iterator)
        if self._torch.is_grad_enabled():
            batch = self.fault.batch(self._torch, batch, self.steps, "loader")
            self._loaded = self._noted(self._digests.tree, batch)
            if self.steps and not self._has_workers and self.fault.workers():
                self._has_workers = True
                self.write("workers")
        return batch

    def forward(self, module: Any, args: Any, kwargs: Any) -> Any:
        """Note the inputs of a model that trains, and return what it gets in their place, if
        anything.
        """
        torch = self._torch
        # Not a copy of one
        trains = module.training and torch.is_grad_enabled() and module in self._hooked
        if not trains or torch.compiler.is_dynamo_compiling():
            return None
        args, kwargs = self.fault.batch(torch, (args, kwargs), self.steps, "forward")
        self._noted(self._enters, module, (args, kwargs))
        return args, kwargs

    def _enters(self, module: Any, inputs: Any) -> None:
        if id(module) not in self._first:
            self._first[id(module)] = self._digests.tensors(module.named_buffers())
        self._calls += 1
        self._entered[id(module)] = self._calls
        self._parts[self._calls] = (
            self._loaded,
            self._digests.tree(inputs),
            self._digests.random_state(),
        )

    def computed(self, module: Any, output: Any) -> None:
        """Mark in the graph of autograd which call of a model has made an output."""
        if not self._torch.compiler.is_dynamo_compiling() and (
            call := self._entered.pop(id(module), 0)
        ):
            nodes = [
                node
                for each in self._digests.tensors_of(output)
                if (node := each.grad_fn) is not None
            ]
            for node in nodes:
                node.metadata[_CALL] = call
            self._used |= set() if nodes else {call}  # it is not seen

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # What a loss is made of is not seen then
        if self._in_backward or original.__name__ == "grad":
            self.fault.meet("" if self._in_backward else "backward", self.steps)
            return original(*args, **kwargs)
        losses = len(self._losses)
        used = (
            self._noted(self._backward_begins, args[0] if args else kwargs.get("tensors")) or set()
        )
        self._in_backward = True
        try:
            self.fault.meet("backward", self.steps)
            result = original(*args, **kwargs)
        except BaseException:  # its forward is no part of the step, which may be made again
            del self._losses[losses:]
            raise
        finally:
            self._in_backward = False
        self._used |= used
        return result

    def _backward_begins(self, given: Any) -> set[int]:
        """Note a loss; return the calls of models that it was made of."""
        roots = list(given) if isinstance(given, (tuple, list)) else [given]
        self._backwards += 1
        if not self._parts:
            self._calls += 1
            self._parts[self._calls] = self._loaded, None, self._digests.random_state()
        if roots and getattr(roots[0], "numel", lambda: 0)() == 1:
            self._losses.append(repr(roots[0].item()))
        used, todo = set[int](), [getattr(root, "grad_fn", None) for root in roots]
        seen = set(todo)
        while todo and not self._parts.keys() <= used:
            if (node := todo.pop()) is not None:
                used.add(node.metadata.get(_CALL, 0))
                todo += (new := {each for each, _ in node.next_functions} - seen)
                seen |= new
        return used

    def _scaler_step(
        self, original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._scale = self._noted(scaler.get_scale)
        return original(scaler, *args, **kwargs)

    def _trained(self, optimizer: Any) -> tuple[list[Any], list[tuple[str, Any]]]:
        """Return the models whose weights an optimizer trains, and these weights."""
        roots = [root() for root in self._held.get(id(optimizer), [lambda: None])]
        if None in roots:
            roots = self._digests.roots(optimizer)
            self._held[id(optimizer)] = [weakref.ref(root) for root in roots]
        groups = [group for made in self._made for group in getattr(made(), "param_groups", ())]
        trained = {id(p) for group in groups for p in group["params"]}
        named = [
            (f"{number}.{name}", p)
            for number, root in enumerate(roots)
            for name, p in root.named_parameters()
        ]
        # An average beside them moves after the step
        named = [(name, p) for name, p in named if id(p) in trained]
        groups = optimizer.param_groups
        return roots, named or [
            (f"{at:04}", p) for group in groups for at, p in enumerate(group["params"])
        ]

    def _state(self, optimizer: Any, first: dict[int, str] | None = None) -> dict[str, Any]:
        """Return digests of what an optimizer trains.

        `first` are those of buffers before anything was computed.
        """
        roots, named = self._trained(optimizer)
        some = [
            getattr(p, "_local_tensor", p).detach().reshape(-1)[:_SEEN_NUMBERS]
            for _, p in named[:8]
        ]
        buffers = [
            self._digests.tensors(root.named_buffers()) if first is None else first.get(id(root))
            for root in roots
        ]
        return {
            "weights": self._digests.tensors(named),
            "buffers": buffers,
            "numbers": [number for each in some for number in each.double().tolist()],
            "holds": f"{[type(root).__name__ for root in roots]} {len(named)}",
            "roots": [id(root) for root in roots] or [id(p) for _, p in named],
        }

    def _is_for_state(self, optimizer: Any) -> bool:
        """Return whether this step only makes the state of its optimizer, as some do before they
        load one.
        """
        if self._backwards:
            return False
        gradients = [
            p.grad
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        rates = [float(group.get("lr", 1.0)) for group in optimizer.param_groups]
        return not any(rates) or not any(bool(gradient.any()) for gradient in gradients)

    def _step_begins(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Which computes the gradients later
        has_closure = any(map(callable, (*args, *kwargs.values())))
        self._skips = not has_closure and self._is_for_state(optimizer)
        if self._skips:
            return
        self.fault.meet("before", self.steps)
        self._before = self._begins = None
        if id(optimizer) not in self._held:
            self._before = {
                **self._state(optimizer, self._first),
                **self._digests.optimizer(optimizer),
            }
            self._optimizers.append(weakref.ref(optimizer))
        if self._has_saved:  # attempts begin here, and weights may move between steps too
            self._begins = self._digests.tensors(self._trained(optimizer)[1])
        groups = optimizer.param_groups
        self._hyper = "; ".join(
            " ".join(f"{n}={g[n]}" for n in _SETTINGS if n in g) for g in groups
        )

    def _step_ends(self, optimizer: Any) -> None:
        if self._skips:
            return
        self.steps += 1
        calls = list(self._parts.values())
        parts = [part for call, part in self._parts.items() if call in self._used] or calls
        batches, inputs, states = zip(*parts, strict=True) if parts else ((), (), ({},))
        self.write(
            "step",
            before=self._before,
            begins=self._begins,
            settings=self._hyper,
            scale=self._scale,
            parts=len(parts),
            batch=batches,
            random=states[0],
            states=[state for *_, state in calls],
            inputs=inputs,
            losses=self._losses,
            which=list(self._held).index(id(optimizer)),
            ranks=own_rank(),
            **self._state(optimizer),
        )
        self._begin_step()
        self.fault.meet("after", self.steps)
        if self.steps == 1 and (name := self.fault.plan.get("random")):
            self._digests.reseed(name)

    # --- saving, evaluating
    # ------------------------------------------------------------------------

    def _eval(self, original: Callable[..., Any], module: Any) -> Any:
        if self.steps:
            self._evaluations += 1
            self._noted(self.write, "eval")
            self.fault.meet("eval", self._evaluations)
        return original(module)

    def _save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # It is pickled
        if self._saving or not self.steps or self._torch.is_storage((*args, *kwargs.values())[0]):
            return original(*args, **kwargs)
        self._saving = True
        self._saves, self._has_saved = self._saves + 1, True
        self.fault.meet("save begins", self._saves)
        result = None
        try:
            result = self._unhooked(original, *args, **kwargs)
        finally:
            self._saving = False
            # That of a guard's own
            given = [*args, *kwargs.values(), getattr(result, "path", None)]
            buffers = [each for each in given if isinstance(each, io.BytesIO)]
            if not buffers:  # else the file is written later
                self.fault.save_ends()
        aside = threading.current_thread() is not threading.main_thread()
        self._noted(
            partial(self._saved, aside=aside),
            given,
            sum(each.getbuffer().nbytes for each in buffers),
        )
        self.fault.meet("save ends", self._saves)
        return result

    def _unhooked(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call it with our hooks taken off.

        They are no part of a model that is saved whole, or made a script of.
        """
        # Else the training goes on, and must be seen
        waits = threading.current_thread() is threading.main_thread()
        for handle in itertools.chain(*self._hooked.values()) if waits else ():
            handle.remove()
        try:
            return original(*args, **kwargs)
        finally:
            for root in list(self._hooked) if waits else ():
                self._hook(root)

    def _saved(self, given: list[Any], size: int, *, aside: bool) -> None:
        named = [getattr(each, "name", None) if hasattr(each, "write") else each for each in given]
        paths = [os.fspath(each) for each in named if isinstance(each, (str, os.PathLike))]
        path = os.path.realpath(paths[0]) if paths else None
        is_place = isinstance(given[0], (str, os.PathLike)) or type(given[0]).__module__.startswith(
            "holdfast."
        )
        entries = {} if is_place else self._digests.saved(given[0])
        if path is not None:
            self._saved_to.add(path)
            sizes = [
                each.stat().st_size
                for each in (Path(path), *Path(path).rglob("*"))
                if each.is_file()
            ]
            size = max(sizes, default=size)
        every = [] if aside else [ref() for ref in self._optimizers]  # they may have stepped since
        states = [
            {"buffers": self._state(o)["buffers"], **self._digests.optimizer(o)} if o else {}
            for o in every
        ]
        self.write("save", path=path, aside=aside, entries=entries, bytes=size, states=states)
        if path is not None:
            self._wrote(path)
