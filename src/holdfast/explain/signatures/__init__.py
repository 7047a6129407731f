"""The catalogue of signatures, one for every known kind of failure.

The entries are in the YAML files beside this module, with the fields of `Signature`. The two
signatures for runs in which nothing failed are defined in code, because `holdfast run` needs no
others for such runs, and reading the files would take longer than everything else it does.

`all_signatures` returns the catalogue, and `kinds_of_unknown` the classes for failures that are not
in it. ``matching`` finds the signatures that match a text. ``endings`` and ``leaks`` define the ids
that code refers to.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from importlib import resources
from typing import Any

from holdfast.explain.signatures.endings import ENDED_WELL, NOT_JUDGED, UNCAUGHT
from holdfast.explain.signatures.leaks import KINDS, signature_of
from holdfast.explain.signatures.signature import Signature

LEAKS_FILE = "leaks.yaml"
# The entries of this file have no ids, so they are not part of the catalogue.
KINDS_FILE = "kinds.yaml"

WELL = Signature(
    id=ENDED_WELL,
    title="ended well",
    family="ended well",
    rank=90,
    means="The run came to its own end.",
    fix="Nothing needs to be done.",
    false_positives="A script that catches its own failure and exits with 0 looks the same.",
)
UNJUDGED = Signature(
    id=NOT_JUDGED,
    title="finished; learning was not judged",
    family="ended well",
    rank=90,
    means=(
        "The command ended with status 0, but holdfast cannot tell whether it did what it was meant"
        " to do."
    ),
    fix=(
        "Check the script's own metrics, such as its validation loss. holdfast judges a loss if an"
        " optimizer made at least ten steps with it and a fall means progress; a Guard checks more"
        " than the loss."
    ),
)


@functools.cache
def all_signatures() -> dict[str, Signature]:
    """Return every signature by its id, in ascending order of the ids.

    Raises:
        ValueError: If two entries have the same id, or an entry has an unknown field.
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
    """Return the kinds that classify exceptions and error lines that match no signature.

    All of them have the id of an unknown exception, because the verdict is the exception itself.
    """
    return tuple(
        _signature_from({"id": UNCAUGHT, "fix": "", **entry}) for entry in _read_entries(KINDS_FILE)
    )


def _entries() -> Iterator[dict[str, Any]]:
    """Yield the entries of all files of the catalogue, and those derived from them."""
    for file in resources.files(__name__).iterdir():
        if not file.name.endswith(".yaml") or file.name == KINDS_FILE:
            continue
        entries = _read_entries(file.name)
        yield from entries
        if file.name == LEAKS_FILE:
            yield from map(_leak_on_device, KINDS, entries)


def _read_entries(name: str) -> list[dict[str, Any]]:
    # Imported here, because a process that only needs the id of a leak never parses YAML.
    import yaml

    text = resources.files(__name__).joinpath(name).read_text(encoding="utf-8")
    # libyaml, where it is installed, is ten times as fast. Both loaders are safe.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    entries: list[dict[str, Any]] = yaml.load(text, loader)  # noqa: S506
    return entries


def _leak_on_device(kind: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Return the entry for a leak in device memory, derived from the one for host memory."""
    return {
        **entry,
        "id": signature_of(kind, on_host=False),
        "title": f"{entry['title']}, on a device",
        "family": "out of memory",
    }


def _signature_from(entry: dict[str, Any]) -> Signature:
    fields = {name: _as_tuples(value) for name, value in entry.items()}
    try:
        return Signature(**fields)
    except TypeError as error:
        raise ValueError(f"signature {entry.get('id')}: {error}") from error


def _as_tuples(value: Any) -> Any:
    """Return a value with all lists in it, nested ones too, as tuples."""
    if isinstance(value, list):
        return tuple(_as_tuples(item) for item in value)
    return value
