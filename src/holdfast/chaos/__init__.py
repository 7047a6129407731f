"""Put any training run to the test: disturb it on purpose, restart it, and compare it bit for bit.

This package is behind ``holdfast chaos`` and needs no change to the training script. It answers two
questions about a training run: does it survive, and is it still the same run?

Entry points are `campaign.Campaign`, `campaign.check_survives` for tests, and the faults in
`faults`, which `holdfast.testing` re-exports. In reading order:

- `campaign`: two undisturbed runs, then one trial for each fault
- `command_check`: commands that cannot be put to the test
- `fault_plans`, `checkpoint_damage`: which faults, and at which step
- `trials`, `workplace`: one trial, in a copy of the working directory
- `observation`, `injection`: inside the processes of the command, what they do and what is done to
  them
- `trace`: what the processes recorded
- `comparison`: where and why an attempt diverges from the undisturbed run
- `judgement`, `results`, `page`: what became of the training run

Nothing here imports torch; the command imports its own.
"""
