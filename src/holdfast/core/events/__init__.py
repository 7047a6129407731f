"""Events: one class for each kind of thing that happens in a run.

Read `event` first (an event as it is read from a recording), then `data` (the base class of all
kinds). The kinds are in `decisions` (how the guard responds to a failure), `run_events` (events in
a training process) and `process_events` (events about processes, recorded by the supervisor, the
watchdog and the observer). To change an event's sentence, edit ``__str__`` of its class.
"""
