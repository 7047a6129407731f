"""The catalogue of signatures: every known way to fail, by its id.

The entries are the YAML files beside this module.

A file is a list of entries, and an entry holds the fields of `Signature`. The two of a run in which
nothing failed
are here: `holdfast run` needs no other then, and to read the files takes as long as all that it
    does.
Does not: match them (see ``weighing``).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from importlib import resources
from typing import Any

from holdfast.explain.signature import Signature
from holdfast.explain.signatures.endings import ENDED_WELL, NOT_JUDGED, UNCAUGHT
from holdfast.explain.signatures.leaks import KINDS, signature_of

_KINDS_OF_UNKNOWN = "kinds.yaml"
WELL = Signature(
    id=ENDED_WELL,
    title="ended well",
    family="ended well",
    rank=90,
    means="The run came to its own end.",
    fix="Nothing is to be done.",
    false_positives="A script that catches its own failure and exits with 0 looks the same.",
)
UNJUDGED = Signature(
    id=NOT_JUDGED,
    title="finished; learning was not judged",
    family="ended well",
    rank=90,
    means=(
        "The command ended with status 0. Whether it did what it was meant to do, holdfast cannot"
        " tell."
    ),
    fix=(
        "Look at what the script measures itself, such as its validation. A loss is judged where an"
        " optimizer made at least ten steps with it and its fall means progress; a Guard looks at"
        " more than the loss."
    ),
)


@functools.cache
def all_signatures() -> dict[str, Signature]:
    """Return every signature by its id, in the order of the ids."""
    found: dict[str, Signature] = {WELL.id: WELL, UNJUDGED.id: UNJUDGED}
    for entry in _entries():
        signature = _signature(entry)
        if signature.id in found:
            raise ValueError(f"two signatures are called {signature.id}")
        found[signature.id] = signature
    return dict(sorted(found.items(), key=lambda pair: int(pair[0][1:])))


@functools.cache
def kinds_of_unknown() -> tuple[Signature, ...]:
    """Return what gives a class to an exception, or a line of an error, that no signature knows."""
    return tuple(_signature({"id": UNCAUGHT, **entry}) for entry in _read(_KINDS_OF_UNKNOWN))


def _entries() -> Iterator[dict[str, Any]]:
    for file in resources.files(__name__).iterdir():
        if file.name.endswith(".yaml") and file.name != _KINDS_OF_UNKNOWN:
            entries = _read(file.name)
            yield from entries
            if file.name == "leaks.yaml":
                yield from map(_on_a_device, KINDS, entries)


def _read(name: str) -> list[dict[str, Any]]:
    import yaml  # here: a process that only asks for the id of a leak does not need it

    text = resources.files(__name__).joinpath(name).read_text(encoding="utf-8")
    entries: list[dict[str, Any]] = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
    return entries


def _on_a_device(kind: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of a leak in host memory as that of the same leak in the memory of a
    device.
    """
    title = f"{entry['title']}, on a device"
    return {
        **entry,
        "id": signature_of(kind, on_host=False),
        "title": title,
        "family": "out of memory",
    }


def _signature(entry: dict[str, Any]) -> Signature:
    """Return an entry as a signature; lists become tuples."""
    fields = {key: _frozen(value) for key, value in entry.items()}
    try:
        return Signature(**fields)
    except TypeError as error:
        raise ValueError(f"signature {entry.get('id')}: {error}") from error


def _frozen(value: Any) -> Any:
    return tuple(_frozen(each) for each in value) if isinstance(value, list) else value
