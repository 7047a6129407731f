"""The catalog of signatures: one for every known kind of failure.

The YAML files in this package's directory contain the entries of the catalog, with the fields of
`Signature`. The two signatures for runs in which nothing failed are defined in code: `holdfast run`
needs no others after a successful run, and parsing the YAML files would take longer than everything
else that it does after the run.

`all_signatures` returns the catalog. `kinds_of_unknown` returns the kinds of failures that match no
signature. ``matching`` finds the signatures that match a text. ``ids`` and ``leaks`` define the
signature ids that code refers to.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from importlib import resources
from typing import Any

from holdfast.explain.signatures.ids import ENDED_WELL, NOT_JUDGED, UNCAUGHT
from holdfast.explain.signatures.leaks import KINDS, signature_of
from holdfast.explain.signatures.signature import Signature

LEAKS_FILE = "leaks.yaml"
# The entries in this file have no ids, so they are not part of the catalog.
KINDS_FILE = "kinds.yaml"

WELL = Signature(
    id=ENDED_WELL,
    title="ended well",
    family="ended well",
    rank=90,
    means="The run ended normally.",
    fix="Nothing needs to be done.",
    false_positives="A script that catches its own failure and exits with status 0 looks the same.",
)
UNJUDGED = Signature(
    id=NOT_JUDGED,
    title="finished; learning was not judged",
    family="ended well",
    rank=90,
    means=(
        "The command ended with status 0, or only its metrics are known, but holdfast cannot tell"
        " whether it did what it was meant to do."
    ),
    fix=(
        "Check the script's own metrics, such as its validation loss. holdfast can judge a loss"
        " only if there are at least ten optimizer steps and a falling loss means progress. A Guard"
        " checks more than the loss."
    ),
)


@functools.cache
def all_signatures() -> dict[str, Signature]:
    """Return all signatures, keyed by id, in ascending order of the ids.

    Raises:
        ValueError: If two entries have the same id or an entry has an unknown field.
    """
    signatures = {WELL.id: WELL, UNJUDGED.id: UNJUDGED}
    for entry in _entries():
        signature = _signature_from(entry)
        if signature.id in signatures:
            raise ValueError(f"two signatures have the id {signature.id}")
        signatures[signature.id] = signature
    return dict(sorted(signatures.items(), key=lambda item: int(item[0][1:])))


@functools.cache
def kinds_of_unknown() -> tuple[Signature, ...]:
    """Return the kinds of failures that match no signature, each of which has a class.

    All of these kinds have the id of an uncaught exception, because the verdict quotes the
    exception itself.
    """
    return tuple(
        _signature_from({"id": UNCAUGHT, "fix": "", **entry}) for entry in _read_entries(KINDS_FILE)
    )


def _entries() -> Iterator[dict[str, Any]]:
    """Yield the entries in all catalog files, and entries for leaks in device memory.

    The latter are derived from the entries for leaks in host memory.
    """
    for file in resources.files(__name__).iterdir():
        if not file.name.endswith(".yaml") or file.name == KINDS_FILE:
            continue
        entries = _read_entries(file.name)
        yield from entries
        if file.name == LEAKS_FILE:
            yield from map(_leak_on_device, KINDS, entries)


def _read_entries(name: str) -> list[dict[str, Any]]:
    # Imported here because a process that needs only the ids of signatures never parses YAML.
    import yaml

    text = resources.files(__name__).joinpath(name).read_text(encoding="utf-8")
    # If PyYAML was built with libyaml, its C loader is ten times as fast. Both loaders are safe.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    entries: list[dict[str, Any]] = yaml.load(text, loader)  # noqa: S506
    return entries


def _leak_on_device(kind: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Return the entry for a leak in device memory, derived from the entry for host memory."""
    return {
        **entry,
        "id": signature_of(kind, on_host=False),
        "title": f"{entry['title']}, on a device",
        "family": "out of memory",
    }


def _signature_from(entry: dict[str, Any]) -> Signature:
    """Return the signature that is described by an entry of a YAML file."""
    fields = {name: _as_tuples(value) for name, value in entry.items()}
    try:
        return Signature(**fields)
    except TypeError as error:
        raise ValueError(f"signature {entry.get('id')}: {error}") from error


def _as_tuples(value: Any) -> Any:
    """Convert all lists in a value, including nested lists, to tuples."""
    if isinstance(value, list):
        return tuple(_as_tuples(item) for item in value)
    return value
