"""The arguments that decide a loader's order and that a script may change while it trains."""

from __future__ import annotations

from torch.utils.data import BatchSampler

from holdfast.loader.order.sampler_state import fingerprint
from holdfast.loader.samplers import has_no_state, samplers_of, torch_loader_of


def digest_order(loader: object) -> bytes | None:
    """Return a digest of what decides the order of an epoch and only the script can change.

    This is a list of batches, or what torch's own samplers were given, such as weights. What
    ``set_epoch`` changes is left out. Returns None if there is nothing of the kind.
    """
    if isinstance(loader, (list, tuple)):
        return repr([id(entry) for entry in loader]).encode()
    torch_loader = torch_loader_of(loader)
    if torch_loader is None:
        return None
    # A BatchSampler is covered by the sampler inside it.
    samplers = [
        sampler for sampler in samplers_of(torch_loader) if type(sampler) is not BatchSampler
    ]
    if not samplers:
        return None
    if any(hasattr(sampler, "set_epoch") or not has_no_state(sampler) for sampler in samplers):
        return None
    arguments = fingerprint(samplers, torch_loader.dataset)
    return arguments.digest if arguments.is_complete else None
