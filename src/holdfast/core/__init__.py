"""The foundation of all other packages: errors, events, the policy, files, text and the clock.

No module in this package imports torch, and only the policy has dependencies outside the standard
library (pydantic and PyYAML). A module goes here only if at least two other packages need it.

Start with `errors` (how every error is built), `events` (what a run records) and `policy` (the
settings of a run). The other modules are small and can be read in any order:

- files: `files` (safe opening), `durable` (durable writes), `lock` (exclusive use by one process)
- processes: `forked`, `threads`, `control_groups`, `importing`
- values: `containers`, `raised` (exceptions as JSON values), `secrets`, `text`
- others: `clock`, `version`, `vector_functions`, `warned`
"""
