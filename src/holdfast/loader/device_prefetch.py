"""Copy batches to an accelerator one ahead of the training loop, on a stream of their own.

While the device works on one batch, the next is copied beside it. Three orders make that safe, none of which makes
the host wait:

- the consumer's stream waits for the copy, before a batch is handed out;
- the copy waits for what the consumer's stream was given before, so memory of an earlier batch that the allocator
  hands to a later one is not written while a kernel still reads it;
- the host keeps what is copied until the copy has ended, so pinned memory is not filled anew under it.
"""

from __future__ import annotations

import functools
from collections import UserDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch.nn.utils.rnn import PackedSequence

from holdfast.core.containers import children_of, rebuilt
from holdfast.core.errors import LoaderError

Item = TypeVar("Item")


def prefetched(items: Iterable[Item], device: torch.device | str | None) -> Generator[Item]:
    """Iterate with every tensor on a device, copied one item ahead.

    An item may be any tree of dicts, lists, tuples, named tuples and dataclasses. Tensors in it are moved, and so is
    what has a method ``to``; all else, and any part without tensors, is handed on as the same object.

    Args:
        items: What to move. It is asked for one item more than was handed out. What it hands out should lie in
            pinned memory; other memory is copied rightly, but the host then waits for its copies. Memory that it
            handed out before must be filled anew only when nothing refers to it any more.
        device: Where to. None or a CPU hands every item on as it is, and a device without streams gets each item
            when it is asked for: both without looking ahead.

    Returns:
        The items in order, ready for the stream that is current when they are asked for. An error of `items` is
        raised after all that came before it was handed out. An item that does not fit into the device's memory
        ahead is copied when it is asked for.

    Raises:
        LoaderError: H607, for a device that is not there.
    """
    target = _target(device)
    # Between two steps nothing is in the processor's caches, so a generator that only hands on is left out.
    return items if target is None and isinstance(items, Generator) else _prefetched(items, target)


def _prefetched(items: Iterable[Item], target: torch.device | None) -> Generator[Item]:
    source = iter(items)
    try:
        if target is None:
            yield from source
        elif hasattr(module := _module_of(target), "Stream"):
            yield from _one_ahead(source, _Lane(module, target))
        else:  # as MPS
            for item in source:
                yield _moved(item, lambda value: value.to(target))
    finally:
        close = getattr(source, "close", None)
        if close is not None:
            close()


def _module_of(device: torch.device) -> Any:
    """Return torch's module of a device, None for one that computes nothing, as "meta"."""
    try:
        return torch.get_device_module(device)
    except RuntimeError:
        return None


def _target(device: torch.device | str | None) -> torch.device | None:
    """Return where to copy to, None for nowhere; H607 if it is not there."""
    try:
        target = None if device is None else torch.device(device)
        if target is None or target.type == "cpu":
            return None
        module = _module_of(target)
        there = module is None or not hasattr(module, "is_available") or module.is_available()
        why = "torch finds none of this kind" if not there else ""
        if module is not None and there and target.index is not None and target.index >= module.device_count():
            why = f"there are {module.device_count()}, counted from 0"
    except (RuntimeError, TypeError) as error:
        why = str(error).partition("\n")[0]
    if why:
        raise LoaderError(
            f"device={device!r} cannot be used ({why})",
            limit="batches are copied to it",
            fix="pass 'cuda', 'cuda:0' or another one that torch finds, or leave it out to keep batches on the CPU.",
            rule="H607",
        )
    return target


def _one_ahead(source: Iterator[Any], lane: _Lane) -> Iterator[Any]:
    try:
        coming = _fetch(source, lane)
        while coming is not None:
            ready = [coming()]
            coming = _fetch(source, lane)
            yield ready.pop()  # no reference stays here: the loop decides how long a batch is kept
    finally:
        lane.finish()


def _fetch(source: Iterator[Any], lane: _Lane) -> Callable[[], Any] | None:
    """Return what hands the next item over, or raises the error that took its place; None at the end."""
    try:
        item = next(source)
    except StopIteration:
        return None
    except Exception as error:  # noqa: BLE001 - raised when it is its turn
        return functools.partial(_raise, error)
    try:
        return lane.begin(item)
    except torch.OutOfMemoryError:
        # Beside the step that comes first there is too little. After it there may be enough, else it is an error.
        return lambda: lane.begin(item)()
    except Exception as error:  # noqa: BLE001 - as above
        return functools.partial(_raise, error)


def _raise(error: Exception) -> None:
    raise error


class _Lane:
    """A stream for copies, and the sources of those that may not have ended.

    Args:
        module: Torch's module of the device, such as ``torch.cuda``.
        device: Where to; without an index the current one.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module = module
        self._device = device if device.index is not None else torch.device(device.type, module.current_device())
        self._stream = module.Stream(self._device)
        self._sources: deque[tuple[Any, Any]] = deque()  # an event, and what is read until it has happened

    def begin(self, item: Any) -> Callable[[], Any]:
        """Start to copy an item; return what makes the consumer's stream wait for it, and gives it out."""
        while self._sources and self._sources[0][0].query():
            self._sources.popleft()
        made: list[torch.Tensor] = []

        def move(value: Any) -> Any:
            waits = not isinstance(value, (torch.Tensor, PackedSequence))
            there = value.to(self._device) if waits else value.to(self._device, non_blocking=True)
            if there is not value and isinstance(there, torch.Tensor):
                made.append(there)
            return there

        # What the loop has freed is given to this stream's next copies, also parts that are not in `made`.
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            moved = _moved(item, move)
            event = self._stream.record_event()
        self._sources.append((event, item))
        return functools.partial(self._hand_over, moved, made, event)

    def _hand_over(self, moved: Any, made: list[torch.Tensor], event: Any) -> Any:
        current = self._module.current_stream(self._device)
        current.wait_event(event)
        for tensor in made:
            # Others may have been given the same stream of torch's pool, and they do not wait as `begin` does.
            if tensor.layout is torch.strided and not tensor.is_nested:
                tensor.record_stream(current)
        return moved

    def finish(self) -> None:
        """Wait for copies that have not ended, since nobody keeps their sources from now on."""
        while self._sources:
            self._sources.popleft()[0].synchronize()


def _moved(node: Any, move: Callable[[Any], Any]) -> Any:
    """Return a tree with its tensors moved; a part in which nothing moved is the same object."""
    # What has a `to` knows best how; but Hugging Face's BatchEncoding, a UserDict, would move in place.
    knows = callable(getattr(node, "to", None)) and not isinstance(node, (type, UserDict))
    if knows:
        return move(node)
    children = children_of(node)
    if children is None:
        return node
    moved = {key: _moved(child, move) for key, child in children.items()}
    same = all(moved[key] is child for key, child in children.items())
    return node if same else rebuilt(node, moved, checked=False)
