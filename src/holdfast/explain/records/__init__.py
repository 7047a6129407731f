"""Read the metrics that other tools recorded, and judge their loss.

The entry points are `reading.read_record`, which returns a `record.Record`, and
`verdict.judge_record`, which returns the verdict on it.

``finding`` decides which tool wrote a file or a directory. There is one reader for each format:
``trainer_state``, ``tensorboard``, ``wandb_run`` and ``csv_table``. Each reader yields values with
the name and the step under which they were logged. ``series`` keeps these values in bounded memory.
``loss_names`` chooses the series that is the training loss, and ``judging`` judges this series.

A record says nothing about how its process ended, so neither does the verdict.
"""
