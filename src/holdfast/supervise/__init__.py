"""Supervise a training command from outside: start it, watch it, forward signals, restart it.

This package never imports torch, because it must start quickly and must still work after a CUDA
context has died. Three parts run *inside* the training process: ``injected``, ``observe`` and the
tracer in ``leaks``. They are given the torch module once the script has imported it.

Entry point: `launch.supervisor.Supervisor`, which ``holdfast run`` drives. Read in this order:

``launch``         the supervisor: attempts, output, signals, restarts
``process_tree``   finds and kills every process of the command
``injected``       starts the observer in every Python process of the command
``observe``        the observer, which records a Python process from inside
``watch``          detects hangs from outside the process
``leaks``          memory leaks: growth measured from outside, objects traced inside

Where to look first:

- Handling of SIGTERM and Ctrl-C: the docstring of ``launch.shutdown``.
- Restart decisions: `RULES` in ``launch.restarts``.
- Hang detection: `Watchdog.check` in ``watch.watchdog``, with the time limit of each phase in
  ``watch.limits``. The cause of a hang is determined in ``holdfast.explain.hangs``.
- Remedies for a hang: `Watchdog._choose_remedy` proposes one, ``launch.attempt`` carries it out.
- Leaks: ``leaks.growth`` decides whether growing memory is a leak, and ``leaks.source_lines`` finds
  the line that keeps the memory alive.
- Contents of a recorded step: `Step` in ``observe.step_writer``.
"""
