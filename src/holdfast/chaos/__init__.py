"""Put any training to the test: disturb it on purpose, restart it, and compare it bit for bit.

This package is behind ``holdfast chaos`` and needs no change to the training script. It is for
questions about one training: does it survive, and is it still the same training?

Entry points: `campaign.Campaign`, `campaign.check_survives` for tests, and the faults in `faults`,
which `holdfast.testing` re-exports.

In the campaign's process, in reading order:

- `campaign`: two undisturbed runs, then one trial for each fault
- `command_check`: commands that cannot be put to the test
- `fault_plans`, `checkpoint_damage`: which faults, at which step
- `trials`, `workplace`, `seccomp`: one trial in a copy of the working directory
- `trace`: what the processes of an attempt recorded
- `reference`, `divergence`, `saved_entries`, `comparison`, `differences`: where an attempt departs
  from the undisturbed run, and why
- `judgement`, `results`, `page`: what became of the training

In each Python process of the command:

- `observer`, `torch_observer`, `file_audit`: see what the training does
- `step_recorder`, `training_state`, `digests`: what a step consists of, in digests
- `trace_writer`, `shield`: write it down without disturbing the script
- `injection`, `injector`, `clock`: carry out the fault at its moment

Nothing here imports torch: a command imports its own.
"""
