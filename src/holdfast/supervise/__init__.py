"""Acts outside the training process: starts it, watches it, signals it and restarts it.

Never imports torch: it must start quickly, and work when a CUDA context is dead. The exceptions run
*inside* the training process (``injected``, ``observe``, and the tracer of ``leaks``); they are
given torch when the script has imported it.

Entry point: `launch.supervisor.Supervisor`, which ``holdfast run`` drives. Read in this order:

``launch``         the supervisor: attempts, output, signals, restarts
``process_tree``   finding and ending every process of the command
``injected``       how observation gets into a Python process
``observe``        what an observed process records about itself
``watch``          hangs, seen from outside
``leaks``          memory that grows: the trend outside, the trace inside

Where to look first:

- What happens on SIGTERM: the docstring of ``launch.shutdown``.
- Whether and how a run is restarted: `RULES` in ``launch.restarts``.
- What is done about a hang: ``watch.watchdog`` proposes, ``launch.attempt`` acts.
"""
