"""The arguments that decide a loader's order and that a script may change while it trains."""

from __future__ import annotations

from torch.utils.data import BatchSampler

from holdfast.loader.foreign import has_no_state, samplers_of, torch_loader_of
from holdfast.loader.order.sampler_state import fingerprint


def order_of(loader: object) -> bytes | None:
    """Return a digest of what decides the order of an epoch and only the script can change, or None
    if there is none.

    It covers the entries of a list of batches, and what torch's own samplers were given, such as
    weights. What ``set_epoch`` changes is left out.
    """
    if isinstance(loader, (list, tuple)):
        return repr([id(entry) for entry in loader]).encode()
    source = torch_loader_of(loader)
    if source is None:
        return None
    # A BatchSampler is looked at by what is inside of it.
    samplers = [sampler for sampler in samplers_of(source) if type(sampler) is not BatchSampler]
    if not samplers or any(
        hasattr(sampler, "set_epoch") or not has_no_state(sampler) for sampler in samplers
    ):
        return None
    arguments = fingerprint(samplers, source.dataset)
    return arguments.digest if arguments.is_complete else None
