"""Test any training run: inject faults, restart the run, and compare the result bit for bit.

This package implements ``holdfast chaos``, which needs no change to the training script. It answers
two questions: Does the run survive each fault, and is it still the same run afterwards?

The entry points are `campaign.Campaign`, `campaign.check_survives` for tests, and the faults in
`faults`, which `holdfast.testing` re-exports. In reading order:

- `campaign`: two undisturbed runs of the command, then one trial for each fault
- `command_check`: rejects commands that cannot be tested
- `fault_plans`, `checkpoint_damage`: which faults to inject, and at which step
- `trials`, `workplace`: one trial, in a copy of the working directory
- `observation`, `injection`: code that runs inside the command's processes, to record what they do
  and to inject the fault
- `trace`: the records of these processes
- `comparison`: where and why an attempt (one start of the command) diverges from the undisturbed
  run
- `judgement`, `results`, `page`: the outcome of each trial, and the report

Where to find the main decisions:

- The kinds of faults are listed as `KINDS` in `fault_plans`, and the ways to inject a fault as
  `Action` in `injection.plan`.
- The outcome of a trial is decided by `RULES` in `judgement`. It is "another training" if a step or
  a saved entry differs from the undisturbed run. `FIELDS` in `comparison.differences` lists which
  parts of a step are compared.
- Differences that also occur between two undisturbed runs are ignored. They are found by
  `comparison.timeline.compare_undisturbed`.

No module in this package imports torch; only the training script does.
"""
