"""`EagerHooks`: module hooks and a function mode that are removed before torch compiles code.

``torch.compile`` would trace the hooks and the mode into its graphs, and would recompile whenever
they are added or removed, until it reaches its recompile limit. A module cannot tell whether it is
called from compiled code, and the first compilation may start in the middle of a step. All hooks
are therefore removed before torch starts its first trace in this process, and are never registered
again. Optimizers, gradients and weights can still be observed, because this requires no module
hooks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from holdfast.numerics.eager import anything_compiled, is_symbolic

DISABLED_NOTICE = (
    "this process uses torch.compile or TorchScript, so inputs and loss arguments are not examined,"
    " because this would trigger recompilation. Gradients, updates and optimizers are still"
    " examined"
)


class Hook:
    """A module hook that is inactive in copies of the module (``deepcopy``, ``torch.save``).

    Args:
        call: The function to call, or None in a copy, which does nothing.
    """

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        """Call the hook's function, unless tensor values cannot be read at the moment."""
        if self._call is not None and not is_symbolic():
            self._call(*args)

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        # Copying or pickling a hook creates one without a function.
        return Hook, ()


class EagerHooks:
    """Manages the module hooks and the function mode of one observer.

    Args:
        mode: The function mode to enter and leave.
        disabled: Whether torch has already compiled code, so that hooks and mode must not be used.
    """

    def __init__(self, mode: TorchFunctionMode, *, disabled: bool) -> None:
        self._mode = mode
        self._disabled = disabled
        # True once `take_notice` has returned the notice.
        self._notice_taken = False
        self._handles: list[RemovableHandle] = []
        self._step_handles: list[RemovableHandle] = []

    @property
    def disabled(self) -> bool:
        """Whether torch has compiled code, so that the hooks and the mode are no longer used."""
        self._disabled = self._disabled or anything_compiled()
        return self._disabled

    def take_notice(self) -> str | None:
        """Return a notice that explains why most observations are off, or None if they are on.

        The notice is returned only once. Later calls return None.
        """
        if self._notice_taken or not self.disabled:
            return None
        self._notice_taken = True
        return DISABLED_NOTICE

    def register_until_close(self, hooks: Iterable[RemovableHandle]) -> None:
        """Register hooks that are removed by `close`.

        Args:
            hooks: A lazy iterable that registers one hook per iteration and yields its handle. If
                torch has compiled code, it is not iterated over, so no hooks are registered.
        """
        self._register(hooks, self._handles)

    def begin_step(self, hooks: Iterable[RemovableHandle]) -> None:
        """Register hooks that are removed by `end_step`.

        Args:
            hooks: A lazy iterable, as in `register_until_close`.
        """
        self.end_step()
        self._register(hooks, self._step_handles)

    def _register(self, hooks: Iterable[RemovableHandle], handles: list[RemovableHandle]) -> None:
        """Register hooks, and ensure that the first compilation removes them."""
        if self.disabled:
            return
        # This import is cheap, because torch.optim has already imported the module.
        from torch._dynamo.callback import callback_handler

        # torch.compiler.reset() drops the callback, so check each time whether it is registered.
        if self._on_compilation not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._on_compilation)
        # Only iterating over `hooks` registers them.
        handles.extend(hooks)

    def end_step(self) -> None:
        """Remove the hooks that `begin_step` has registered."""
        remove_all(self._step_handles)

    def enter_mode(self) -> None:
        """Enter the function mode, unless torch has compiled code."""
        if not self.disabled:
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def leave_mode(self) -> None:
        """Leave the function mode if it is active, even if other modes were entered after it."""
        above = []
        while torch._C._len_torch_function_stack():
            top = torch._C._pop_torch_function_stack()
            if top is self._mode:
                break
            above.append(top)
        for mode in reversed(above):
            torch._C._push_on_torch_function_stack(mode)

    def close(self) -> None:
        """Remove all hooks. May be called several times."""
        self.end_step()
        remove_all(self._handles)
        handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
        if handler is not None and self._on_compilation in handler.start_callbacks:
            handler.remove_start_callback(self._on_compilation)

    def _on_compilation(self, _arguments: Any) -> None:
        # Remove all hooks and leave the mode, because torch is about to compile code.
        self._disabled = True
        self.end_step()
        remove_all(self._handles)
        self.leave_mode()


def remove_all(handles: list[RemovableHandle]) -> None:
    """Remove the hooks that belong to these handles, and empty the list of handles."""
    for handle in handles:
        handle.remove()
    handles.clear()
