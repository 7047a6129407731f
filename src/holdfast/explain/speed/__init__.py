"""Why a run is slow: what its training loop spends its time on, and how to shorten it.

``time_use`` holds the measurements, ``reading`` reads them from a run directory, and ``rules``
judges them. The result is a `SpeedFinding` (in ``explain.speed_finding``), which the views show.
"""
