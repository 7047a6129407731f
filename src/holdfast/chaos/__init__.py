"""Test any training run: inject faults, restart it, and compare it bit for bit.

This package implements ``holdfast chaos`` and needs no change to the training script. It answers
two questions: does the run survive each fault, and is it still the same run afterwards?

Entry points are `campaign.Campaign`, `campaign.check_survives` for tests, and the faults in
`faults`, which `holdfast.testing` re-exports. In reading order:

- `campaign`: two undisturbed runs of the command, then one trial for each fault
- `command_check`: refuses commands that cannot be tested
- `fault_plans`, `checkpoint_damage`: which faults to inject, and at which step
- `trials`, `workplace`: one trial, in a copy of the working directory
- `observation`, `injection`: code that runs inside the command's processes, to record what they do
  and to inject the fault
- `trace`: the records of these processes
- `comparison`: where and why an attempt (one start of the command) diverges from the undisturbed
  run
- `judgement`, `results`, `page`: the outcome of each trial, and the report

Where to look first:

- Which kinds of faults exist: `KINDS` in `fault_plans`. How a fault is injected: `Action` in
  `injection.plan`.
- How the outcome of a trial is decided: `RULES` in `judgement`. The outcome is "another training"
  if a step or a saved entry differs from the undisturbed run: `FIELDS` in `comparison.differences`.
- Which differences are ignored, because they also occur between two undisturbed runs:
  `comparison.timeline.compare_undisturbed`.

Nothing here imports torch; the training script imports it.
"""
