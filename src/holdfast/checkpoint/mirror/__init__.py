"""Keep copies of a run's newest checkpoints in another store, and resume from them elsewhere.

``location`` reads and writes files in any store that fsspec can reach. ``folder`` lays out a mirror
in such a location: who owns it, and which copies it holds. ``lineage`` decides how the checkpoints
of a run directory and those of its mirror are related. ``mirror`` takes a mirror over, fetches the
newest checkpoint from it, and copies one to it. ``copier`` does the copying in a background thread,
which outlives an unreachable store.

Object stores cannot rename a folder, so a copy is complete once its manifest exists, which is
written last. They have no locks either, so a newer owner of a mirror fences off the older one: each
copy carries the number of its owner, and the copies of newer owners come first.

No module of this package imports torch.
"""
