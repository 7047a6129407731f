"""The events that a run records, with one class for each kind of event.

Read `event` first (an event as it is read from a recording), then `data` (the base class of all
kinds of events). The kinds are in `decisions` (how the guard responds to a failure), `run_events`
(events in a training process) and `process_events` (events about processes, recorded by the
supervisor, the watchdog and the observer). To change the sentence that describes an event, edit
the ``__str__`` method of its class.
"""
