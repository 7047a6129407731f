"""Act outside the training process: start it, watch it, signal it and restart it.

This package never imports torch: it must start quickly, and work when a CUDA context is dead. Three
parts run *inside* the training process (``injected``, ``observe``, and the tracer in ``leaks``);
they receive the torch module once the script has imported it.

Entry point: `launch.supervisor.Supervisor`, which ``holdfast run`` drives. Read in this order:

``launch``         the supervisor: attempts, output, signals, restarts
``process_tree``   finding and ending every process of the command
``injected``       how observation gets into a Python process
``observe``        what an observed process records about itself
``watch``          hangs, seen from outside
``leaks``          memory that grows: the trend outside, the trace inside

Where to look first:

- What happens on SIGTERM and on Ctrl-C: the docstring of ``launch.shutdown``.
- Whether and how a run is restarted: `RULES` in ``launch.restarts``.
- How a hang is noticed: `Watchdog.check` in ``watch.watchdog``. How long a phase may go without
  progress: ``watch.limits``. What kind of hang it is: ``holdfast.explain.hangs``.
- What is done about a hang: `Watchdog._choose_remedy` proposes, ``launch.attempt`` acts.
- When growing memory counts as a leak: ``leaks.growth``. Which line keeps the memory:
  ``leaks.source_lines``.
- What a recorded step contains: `Step` in ``observe.step_writer``.
"""
