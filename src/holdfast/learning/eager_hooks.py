"""`EagerHooks`: hooks on modules, and a mode on functions, that are removed when torch compiles.

``torch.compile`` traces both into its graphs, and compiles again when they come or go, until it
gives up. A module does not know who calls it, and compilation may first begin in the middle of a
step. So all of them are removed when torch begins to compile anything in this process, before it
traces, and do not come back. What an optimizer, a gradient or a weight shows needs none of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from holdfast.numerics.eager import anything_compiled, is_symbolic

LOST = (
    "torch.compile or TorchScript is at work in this process, so the diagnosis does not see inputs"
    " and the arguments of losses: looking at them would compile again. It sees gradients, updates"
    " and optimizers"
)


class Hook:
    """A hook on a module that ``deepcopy`` and ``torch.save`` do not copy with the module."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        """Call the function, if values can be read at the moment."""
        if self._call is not None and not is_symbolic():
            self._call(*args)

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


class EagerHooks:
    """The hooks and the mode of one observer.

    Args:
        mode: The mode.
        lost: Whether something is compiled already, so that there can be neither.
    """

    def __init__(self, mode: TorchFunctionMode, *, lost: bool) -> None:
        self._mode = mode
        self._lost = lost
        self._kept: list[RemovableHandle] = []
        self._of_step: list[RemovableHandle] = []

    @property
    def lost(self) -> bool:
        """Whether something is compiled, so that hooks and mode are gone."""
        self._lost = self._lost or anything_compiled()
        return self._lost

    def keep(self, hooks: Iterable[RemovableHandle]) -> None:
        """Register hooks until `close`.

        Args:
            hooks: Registers one at a time, lazily, so that none is registered if all are lost.
        """
        self._register(hooks, self._kept)

    def begin_step(self, hooks: Iterable[RemovableHandle]) -> None:
        """Register hooks until `end_step`, likewise."""
        self.end_step()
        self._register(hooks, self._of_step)

    def _register(self, hooks: Iterable[RemovableHandle], handles: list[RemovableHandle]) -> None:
        if self.lost:
            return
        # Any optimizer has imported this already.
        from torch._dynamo.callback import callback_handler

        # torch.compiler.reset() forgets callbacks, so look again each time.
        if self._on_compilation not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._on_compilation)
        handles += hooks

    def end_step(self) -> None:
        """Remove the hooks of a step."""
        remove_all(self._of_step)

    def enter_mode(self) -> None:
        """Begin to see function calls."""
        if not self.lost:
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def leave_mode(self) -> None:
        """Leave the mode if it is entered, even if other modes above it have not been left yet."""
        above = []
        while torch._C._len_torch_function_stack():
            top = torch._C._pop_torch_function_stack()
            if top is self._mode:
                break
            above.append(top)
        for mode in reversed(above):
            torch._C._push_on_torch_function_stack(mode)

    def close(self) -> None:
        """Remove everything. It may be called several times."""
        self.end_step()
        remove_all(self._kept)
        handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
        if handler is not None and self._on_compilation in handler.start_callbacks:
            handler.remove_start_callback(self._on_compilation)

    def _on_compilation(self, _arguments: Any) -> None:
        self._lost = True
        self.end_step()
        remove_all(self._kept)
        self.leave_mode()


def remove_all(handles: list[RemovableHandle]) -> None:
    """Remove hooks, and forget them."""
    for handle in handles:
        handle.remove()
    handles.clear()
