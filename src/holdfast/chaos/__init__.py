"""Put any training run to the test: disturb it on purpose, restart it, and compare it bit for bit.

This package is behind ``holdfast chaos`` and needs no change to the training script. It answers two
questions about a training run: does it survive, and is it still the same run?

Entry points are `campaign.Campaign`, `campaign.check_survives` for tests, and the faults in
`faults`, which `holdfast.testing` re-exports. In reading order:

- `campaign`: two undisturbed runs, then one trial for each fault
- `command_check`: commands that cannot be put to the test
- `fault_plans`, `checkpoint_damage`: which faults, and at which step
- `trials`, `workplace`: one trial, in a copy of the working directory
- `observation`, `injection`: code that runs inside the processes of the command, to record what
  they do and to inject the fault
- `trace`: what the processes recorded
- `comparison`: where and why an attempt diverges from the undisturbed run
- `judgement`, `results`, `page`: the outcome of each trial, and the report

Where to look first:

- Which kinds of faults exist: `KINDS` in `fault_plans`. How one is injected: `Action` in
  `injection.plan`.
- How the outcome of a trial is decided: `RULES` in `judgement`. The run counts as "another
  training" if a step or a saved entry differs from the undisturbed run: `FIELDS` in
  `comparison.differences`.
- Which differences are ignored because two undisturbed runs have them as well:
  `comparison.timeline.compare_undisturbed`.

Nothing here imports torch; the command imports its own.
"""
