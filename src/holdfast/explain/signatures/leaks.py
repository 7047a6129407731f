"""What is known about memory that is kept from step to step. Chosen by the events ``leak`` and ``memory_trend``."""

from __future__ import annotations

from holdfast.explain.signature import Family, Signature

_SEEN = "reproduced on torch 2.13 (benchmarks/leak_lines.py)"
_PLACES: tuple[tuple[int, str, Family], ...] = ((0, "", "host out of memory"), (20, ", on a device", "out of memory"))
"""Added to the number, added to the title, and family: in host memory, and in that of a device."""


def _leak(
    number: int, title: str, *, means: str, fix: str, example: str, false_positives: str = "", seen: str = _SEEN
) -> tuple[Signature, Signature]:
    """Return a leak in host memory, and the same in the memory of a device."""
    on_host, on_device = (
        Signature(
            id=f"H{number + added}",
            title=f"{title}{place}",
            family=family,
            patterns=(),
            means=means,
            fix=fix,
            false_positives=false_positives,
            example=example,
            seen=seen,
        )
        for added, place, family in _PLACES
    )
    return on_host, on_device


BY_KIND: dict[str, tuple[Signature, Signature]] = {
    "container": _leak(
        1501,
        "a container grows at every step",
        means="A list, dict, set or queue gets new entries at each step and gives none back, so memory grows until "
        "there is none.",
        fix="Keep numbers instead of tensors and arrays (`loss.item()`), keep a bounded number "
        "(`collections.deque(maxlen=...)`), or write to a file and clear.",
        example="list of Tensor (64, 32) float32 are kept by history[...] in train.py, at train.py:31 in train: "
        "history.append(outputs.detach())",
        false_positives="A cache that fills during its first epoch, and fits.",
    ),
    "graph": _leak(
        1502,
        "tensors are kept with the graph that they were computed by",
        means="A tensor that requires gradients keeps the graph behind it, and with it, unless backward has run, all "
        "activations of its step. A list of losses then grows by a whole forward pass a step.",
        fix="Keep `loss.item()`, or `outputs.detach()`, or `.detach().cpu()` for tensors of a GPU.",
        example="list of Tensor () float32 are kept by losses[...] in train.py, at train.py:31 in train: "
        "losses.append(loss)",
    ),
    "autograd chain": _leak(
        1503,
        "the graph behind a tensor grows at every step",
        means="A value is computed from that of the step before (`total = total + loss`, a recurrent state, a "
        "running mean), so its graph goes back to the first step. After backward only the nodes remain; without it "
        "all that they saved does.",
        fix="Detach what is carried over: `total += loss.detach()`, `hidden = hidden.detach()`.",
        example="graph behind Tensor () float32 are kept by total in train.py, at train.py:31 in train: "
        "total = total + loss",
        false_positives="A loss over a window of steps that is meant, and is detached at its end.",
    ),
    "cycle": _leak(
        1504,
        "objects that refer to each other hold tensors until the collector runs",
        means="Nothing uses them any more, but they refer to each other in a circle, so that only the garbage "
        "collector frees them. It counts objects, not bytes: gigabytes of tensors may wait for it.",
        fix="Break the circle where it is closed (`weakref`, or delete the attribute at the end of the step). Until "
        "then call `gc.collect()` every some steps. If the script has called `gc.disable()` or `gc.freeze()`, look "
        "there first.",
        example="Tensor (64, 32) float32 are kept by a cycle: Node.parent, at train.py:12 in attach: "
        "child.parent = self",
    ),
    "hooks": _leak(
        1505,
        "a hook is registered at every step and never removed",
        means="Each registration adds a hook with all that its function refers to, and each runs at every call: the "
        "steps also become slower.",
        fix="Register once before the loop, or keep the handle and call `handle.remove()`.",
        example="OrderedDict of function are kept by model._forward_hooks[...] in train.py, at train.py:31 in train: "
        "model.register_forward_hook(save)",
    ),
    "exception": _leak(
        1506,
        "exceptions are kept, and their tracebacks keep the locals of all frames",
        means="An exception refers to its traceback, that to the frames, and those to every local at the moment of "
        "the failure: batch, activations, loss.",
        fix="Keep `repr(error)` or `traceback.format_exc()`, or call `traceback.clear_frames(error.__traceback__)`, "
        "or set `error.__traceback__ = None`.",
        example="list of RuntimeError are kept by failures[...] in train.py, at train.py:31 in train: "
        "failures.append(error)",
    ),
    "cache": _leak(
        1507,
        "a cache of a function grows at every step",
        means="`functools.cache` and `lru_cache` keep arguments and results. Tensors compare by identity, so each "
        "new tensor is a new entry that is never found again.",
        fix="Take the decorator off, or give it what repeats (a shape, a path) and a `maxsize`.",
        example="dict of Tensor (64, 32) float32 are kept by cache of features, at train.py:9 in features: "
        "@lru_cache(maxsize=None)",
    ),
    "linked": _leak(
        1508,
        "each step keeps what the step before has made",
        means="An object of this step refers to that of the step before, and that to the one before it: a linked "
        "list, a chain of closures or of states.",
        fix="Drop the reference to what came before when the step ends, or keep the last few.",
        example="Tensor (64, 32) float32 are kept by head.tail in train.py, at train.py:31 in train: "
        "head = Node(batch, head)",
    ),
    "value": _leak(
        1509,
        "a value becomes longer at every step",
        means="Text, an array or a tensor is built by adding to what it was (`torch.cat`, `np.append`, `+=`). It "
        "grows, and is copied whole each time.",
        fix="Write to a file as you go, or keep what is needed of it only.",
        example="Tensor (640, 32) float32 are kept by seen in train.py, at train.py:31 in train: "
        "seen = torch.cat([seen, batch])",
    ),
    "unknown": _leak(
        1510,
        "ever more tensors live, and it is not known what holds them",
        means="Nothing in Python refers to them that could be named: they are held by an extension or by C++.",
        fix="Look at the line where they were made. For a GPU, `torch.cuda.memory._record_memory_history()` and its "
        "snapshot show the calls in C++.",
        example="Tensor (64, 32) float32 are kept by ?, at ?",
        seen="not reproduced: no extension at hand that leaks",
    ),
    "trend": _leak(
        1511,
        "memory grew at every step until there was none",
        means="It grew on at the same pace, beyond warm-up and caches, which is what a leak looks like. No line was "
        "found: the memory is held outside of Python objects, or the process did not trace it before it ended.",
        fix="Look for what is kept from step to step: losses without `.item()`, lists, caches, workers. Fewer "
        "workers or smaller batches only postpone it.",
        example="host memory grew by 1.20 MiB a step, full in 41 minutes",
        false_positives="Allocators that keep what fragments: with glibc, `MALLOC_ARENA_MAX=2`.",
    ),
}
"""In host memory and in that of a device, by the kind that the trace finds."""


def signature_of(kind: str, *, on_host: bool) -> str:
    """Return the id of a leak.

    Args:
        kind: A key of `BY_KIND`.
        on_host: Whether the memory is the host's.
    """
    return BY_KIND[kind][0 if on_host else 1].id


SIGNATURES: tuple[Signature, ...] = tuple(each for pair in BY_KIND.values() for each in pair)
