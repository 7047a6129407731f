"""Events: one class for each kind of thing that happens in a run.

Read `event` first (an event as readers get it), then `data` (the base class of all kinds). The
kinds are in `decisions` (what the guard does about a failure), `run_events` (events in a training
process) and `process_events` (events of processes, recorded by the supervisor, the watchdog and the
observer). To change what an event says, edit ``__str__`` of its class.
"""
