"""What happens in a run: one class for each kind of event.

Read `event` first (the record that readers get), then `data` (what all kinds have in common). The
kinds are in `decisions` (what the guard does about a failure), `run_events` (what happens in a
training process) and `process_events` (what the supervisor and its watchdog see).
"""
