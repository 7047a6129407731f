"""The foundation of all other packages: errors, events, the policy, files, text and the clock.

Nothing here imports torch, and everything except the policy (pydantic, YAML) needs only the
standard library. A module belongs here only if at least two other packages need it.

Start with `errors` (how every error is built), `events` (what a run records) and `policy` (the
settings of a run). The other modules are independent of each other:

- files: `files` (safe opening), `durable` (durable writes), `lock` (exclusive use by one process)
- processes: `forked`, `threads`, `control_groups`, `importing`
- values: `containers`, `raised` (exceptions as JSON values), `secrets`, `text`
- `clock`, `version`, `vector_functions`, `warned`
"""
