"""Why a run is slow: what its training loop spends its time on, and how to shorten it.

``time_use`` holds the measurements, ``reading`` reads them from a run directory, ``rules`` judges
them, and ``finding`` is what the views show.
"""
