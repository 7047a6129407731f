"""`EagerHooks`: hooks on modules and a mode on functions, which see into models as long as nothing
is compiled.

``torch.compile`` traces both into its graphs and compiles anew when they come or go, until it gives
up. A module does not know by what it is called, and what is compiled may first be so in the middle
of a step. So all of them go when torch begins to compile anything in this process, before it
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
    "torch.compile or TorchScript is at work in this process, so the diagnosis does not see"
    " activations, inputs and what losses are given: looking at them would compile anew. It sees"
    " gradients, updates and optimizers"
)


class Hook:
    """A hook on a module that a copy of it does not have.

    Neither ``deepcopy`` nor ``torch.save`` takes it.
    """

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        """Call what was given, if values can be read just now."""
        if self._call is not None and not is_symbolic():
            self._call(*args)

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


class EagerHooks:
    """The hooks and the mode of one observer; `lost`: there can be none from the beginning."""

    def __init__(self, mode: TorchFunctionMode, *, lost: bool) -> None:
        self._mode = mode
        self._lost = lost
        self._kept: list[RemovableHandle] = []
        self._of_step: list[RemovableHandle] = []

    @property
    def lost(self) -> bool:
        """Whether something is compiled, so that nothing is seen."""
        self._lost = self._lost or anything_compiled()
        return self._lost

    def keep(self, hooks: Iterable[RemovableHandle]) -> None:
        """Make these hooks (lazily: none if all is lost) and keep them until `close`."""
        self._make(hooks, self._kept)

    def begin_step(self, hooks: Iterable[RemovableHandle]) -> None:
        """Make these hooks and keep them until `end_step`."""
        self.end_step()
        self._make(hooks, self._of_step)

    def _make(self, hooks: Iterable[RemovableHandle], kept: list[RemovableHandle]) -> None:
        if self.lost:
            return
        from torch._dynamo.callback import callback_handler  # an optimizer has imported it already

        # Torch.compiler.reset() forgets it
        if self._compilation_begins not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._compilation_begins)
        kept += hooks

    def end_step(self) -> None:
        """Remove the hooks of a step."""
        remove_all(self._of_step)

    def enter_mode(self) -> None:
        """See functions from now on."""
        if not self.lost:
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def leave_mode(self) -> None:
        """Leave the mode if it is entered, also where others were entered after it and are not
        left yet.
        """
        above = []
        while torch._C._len_torch_function_stack():
            top = torch._C._pop_torch_function_stack()
            if top is self._mode:
                break
            above.append(top)
        for mode in reversed(above):
            torch._C._push_on_torch_function_stack(mode)

    def close(self) -> None:
        """Remove all; may be called again."""
        self.end_step()
        remove_all(self._kept)
        handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
        if handler is not None and self._compilation_begins in handler.start_callbacks:
            handler.remove_start_callback(self._compilation_begins)

    def _compilation_begins(self, _what: Any) -> None:
        self._lost = True
        self.end_step()
        remove_all(self._kept)
        self.leave_mode()


def remove_all(handles: list[RemovableHandle]) -> None:
    """Remove hooks, and forget them."""
    for handle in handles:
        handle.remove()
    handles.clear()
