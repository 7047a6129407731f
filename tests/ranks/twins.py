"""Ranks that leave out their part of an agreement: a test that does not catch one of them proves nothing."""

from __future__ import annotations

from dataclasses import replace

from holdfast.guard.cursor import Cursor
from holdfast.guard.ranks import messages, ranks, sharded
from holdfast.guard.ranks.row import Rows
from holdfast.guard.run import session


def _hears_the_first_only(_rank):
    Rows.items = property(lambda rows: rows.each[0][2] * len(rows.each))


def _counts_what_repeats(_rank):
    Cursor.repeats = lambda _: False


def _judges_by_itself(rank):
    Rows.loss = property(lambda rows: rows.each[rank][3])


def _does_not_say_stop(_rank):
    ranks._Stop.said = lambda _: 0.0


def _does_not_go_back(rank):
    if rank:
        session.live_tensors = lambda _: {}
        session.load = lambda trees, parts: None


def _measures_its_shards_only(_rank):
    sharded.Sharded.norms = lambda _, own: list(own)


def _reads_the_first_rows(_rank):
    rows_of = sharded._rows_of
    sharded._rows_of = lambda p: replace(share := rows_of(p), begin=0, end=share.end - share.begin)


def _sees_its_own_share_only(rank):
    everything = messages.SharedWriters.all

    def own(writers, work):
        found = everything(writers, work)
        return [found[rank]] * len(found) if isinstance(found[0], list) else found

    messages.SharedWriters.all = own


TWINS = {
    None: lambda _: None,
    "hears the items of the first rank only": _hears_the_first_only,
    "counts what repeats": _counts_what_repeats,
    "judges by itself": _judges_by_itself,
    "does not say that it was asked to stop": _does_not_say_stop,
    "does not go back": _does_not_go_back,
    "measures its shards only": _measures_its_shards_only,
    "reads the first rows": _reads_the_first_rows,
    "sees its own share only": _sees_its_own_share_only,
}
"""What is broken on each rank, by name."""
