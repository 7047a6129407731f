"""What all other packages stand on: errors, events, the policy, files, text and the clock.

Nothing here imports torch, and apart from the policy (pydantic, YAML) the standard library is
enough. A module is in this package only if two other packages need it.

Start with `errors` (how every error is built), `events` (what a run records) and `policy` (the
settings of a run). The other modules are independent of each other:

- files: `files` (opened safely), `durable` (written durably), `lock` (held by one process)
- processes: `forked`, `threads`, `control_groups`, `importing`, `user_modules`
- values: `containers`, `raised` (exceptions as facts), `secrets`, `text`
- `clock`, `version`, `vector_functions`, `warned`
"""
