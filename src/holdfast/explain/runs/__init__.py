"""Read a run directory into facts. Nothing here chooses a cause.

``recordings`` opens a directory and reads its event rings, even damaged ones; ``statements`` turns
events into exceptions and applied remedies; ``curves`` finds losses that diverged; ``learning``
judges whether a loss fell. ``explain.collecting`` combines the results.
"""
