"""What a run directory holds, read into facts. Nothing here chooses a cause.

``recordings`` opens a directory and reads its rings of events, whatever state they are in;
``statements`` turns events into what was raised and what was tried; ``curves`` finds losses that
diverged; ``learning`` judges whether a loss fell. ``explain.collecting`` puts them together.
"""
