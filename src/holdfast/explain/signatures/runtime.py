"""What is known from how a process ended, where no text says why: chosen by `judging`, not by patterns.

Where the table of signatures has a row for it, that row is chosen: killed by the kernel for memory is H909, a crash
by SIGSEGV is H991. Here is the rest.
"""

from __future__ import annotations

from holdfast.explain.signature import Signature

UNKNOWN = "H1600"
ENDED_WELL = "H1601"
KILLED = "H1602"
TERMINATED = "H1603"
INTERRUPTED = "H1604"
ABORTED = "H1605"
BUS_ERROR = "H1606"
STATUS_ONLY = "H1607"
UNCAUGHT = "H1608"
PREDICTED_OUT_OF_MEMORY = "H1609"
NEVER_STARTED = "H1610"
STILL_RUNNING = "H1611"
STUCK = "H1612"
HUNG_UP = "H1613"
OTHER_SIGNAL = "H1614"
CHILD_FAILED = "H1615"
SUPERVISOR_LOST = "H1616"
TRAINING_LOST = "H1617"
OUT_OF_MEMORY_KILL = "H909"
SEGMENTATION_FAULT = "H991"
SCHEDULER = "H990"
COLLECTIVE_TIMEOUT = "H921"

SIGNATURES: tuple[Signature, ...] = (
    Signature(
        id=UNKNOWN,
        title="unknown",
        family="unknown",
        patterns=(),
        rank=90,
        means="Nothing that was seen says why the run ended, and a guess would mislead.",
        fix="Look at what is missing below. Start it with `holdfast run -- ...`, which records the exit status, "
        "the memory "
        "counters of the control group, the last step and the stacks.",
        example="",
        seen="judged from what is missing",
    ),
    Signature(
        id=ENDED_WELL,
        title="ended well",
        family="ended well",
        patterns=(),
        rank=90,
        means="The run came to its own end.",
        fix="Nothing is to be done.",
        false_positives="A script that catches its own failure and exits with 0 looks the same.",
        example="",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id=KILLED,
        title="killed from outside",
        family="preempted",
        patterns=(
            r"^Killed$",
            r"^\S+: line \d+:\s+\d+ Killed\b",
            r"^srun: error: \S+: tasks? [\d,-]+: Killed$",
        ),
        rank=80,
        restart="retry",
        means="The process was ended by SIGKILL, and no counter says that the kernel did it for memory: a person, a "
        "scheduler, a container's limit elsewhere or a watchdog.",
        fix="Ask the scheduler or the container runtime for its reason first (`sacct`, `kubectl describe pod`, "
        "`dmesg`). If "
        "memory rose before the end, take it for a lack of memory: fewer workers, smaller batches.",
        false_positives="Without the counters of the control group a kill for memory looks the same.",
        example="Killed",
        seen="reproduced on torch 2.13",
        also={"bash": "./train.sh: line 3:  4711 Killed                  python train.py"},
    ),
    Signature(
        id=TERMINATED,
        title="terminated from outside",
        family="preempted",
        patterns=(
            r"^Terminated$",
            r"^\S+: line \d+:\s+\d+ Terminated\b",
            r"\bReceived (?:SIGTERM|signal 15)\b",
            r"\*\*\* SIGTERM received at time=",
        ),
        rank=80,
        restart="preempted",
        means="The process was asked to end by SIGTERM: by a scheduler at its time limit or for another job, by "
        "the stop of "
        "a container, or by a person.",
        fix="Look up who sent it (`sacct -j`, `kubectl describe pod`). Save a checkpoint at SIGTERM, which a Guard "
        "does, and "
        "resume from it.",
        example="Terminated",
        seen="reproduced on torch 2.13",
        also={"bash": "./train.sh: line 3:  4711 Terminated              python train.py"},
    ),
    Signature(
        id=INTERRUPTED,
        title="interrupted by the user",
        family="preempted",
        patterns=(r"^(?:.*\.)?KeyboardInterrupt\b",),
        exceptions=("KeyboardInterrupt",),
        only_exceptions=True,
        rank=12,
        means="SIGINT came, as Ctrl-C sends it: somebody stopped the run.",
        fix="Start it again; with a Guard it resumes from the newest checkpoint.",
        false_positives="Closing a notebook or a terminal multiplexer can send the same signal.",
        example='Traceback (most recent call last):\n  File "train.py", line 9, in <module>\nKeyboardInterrupt',
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id=ABORTED,
        title="aborted by native code",
        family="crash",
        patterns=(
            r"^Aborted(?: \(core dumped\))?$",
            r"^\S+: line \d+:\s+\d+ Aborted\b",
            r"^Fatal Python error: Aborted",
        ),
        rank=80,
        means="The process ended by SIGABRT: a failed assertion or an uncaught exception in native code, or a "
        "watchdog of a "
        "library. Nothing that it printed says which.",
        fix="Run with `PYTHONFAULTHANDLER=1` and read the stack; look for lines of the library right before the end.",
        example="Aborted (core dumped)",
        seen="reproduced on torch 2.13",
        also={"faulthandler": "Fatal Python error: Aborted"},
    ),
    Signature(
        id=BUS_ERROR,
        title="bus error",
        family="host out of memory",
        patterns=(
            r"^Bus error(?: \(core dumped\))?$",
            r"^\S+: line \d+:\s+\d+ Bus error\b",
            r"^Fatal Python error: Bus error",
        ),
        rank=80,
        means="A page of a mapped file could not be had: /dev/shm is full, or a file was cut or its disk failed "
        "while it "
        "was mapped.",
        fix="Look at `df /dev/shm` first and give it more room (`--shm-size` of the container), or take fewer "
        "workers. Then "
        "look at the disk of the data and whether something rewrites its files.",
        example="Bus error (core dumped)",
        seen="reproduced on torch 2.13",
        also={"faulthandler": "Fatal Python error: Bus error"},
    ),
    Signature(
        id=STATUS_ONLY,
        title="ended with an exit status and no word why",
        family="unknown",
        patterns=(),
        rank=90,
        means="The command ended with a status that is not 0, and nothing that it printed explains it. Usual causes: "
        "`sys.exit(1)` or `os._exit` after an error that was caught, or output that went elsewhere.",
        fix="Look for where the script exits by itself, and let it print the reason to the standard error first.",
        example="",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id=UNCAUGHT,
        title="an exception that nobody caught",
        family="user code",
        patterns=(),
        rank=95,
        means="An exception ended the process, and no signature knows its text: it is most likely of the program "
        "itself.",
        fix="Read the message and the line of the traceback that is your own code; it says what was found and where.",
        example="",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id=PREDICTED_OUT_OF_MEMORY,
        title="killed while memory was running out",
        family="host out of memory",
        patterns=(),
        rank=80,
        restart="remedy",
        means="The process was ended by SIGKILL after its memory had grown from step to step towards the limit, as "
        "was said "
        "before the end. The counter of the kernel could not be read.",
        fix="Find what grows: the leak that was named, else see `holdfast explain H955`. Then take fewer workers, "
        "a smaller "
        "batch, or a higher limit.",
        example="",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id=NEVER_STARTED,
        title="the command could not be started",
        family="environment",
        patterns=(
            r"^\S+: (?:line )?\d*:? ?\S+: (?:command not found|not found)$",
            r"^\S+: can't open file '.*': \[Errno 2\] No such file or directory$",
        ),
        rank=70,
        means="The shell or the interpreter found no such program or script, or may not execute it (status 127 and "
        "126).",
        fix="Check the path and the working directory of the command, and that the environment is activated.",
        example="bash: line 1: torchrunn: command not found",
        seen="reproduced on torch 2.13",
        also={
            "python 3.11": "python: can't open file '/home/user/trian.py': [Errno 2] No such file or directory",
            "dash": "sh: 1: torchrunn: not found",
        },
    ),
    Signature(
        id=STILL_RUNNING,
        title="still running",
        family="ended well",
        patterns=(),
        rank=90,
        means="A process of the run lives and no end is recorded.",
        fix="`holdfast watch` shows it live.",
        example="",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id=STUCK,
        title="stood still",
        family="hang",
        patterns=(),
        rank=80,
        restart="retry",
        means="Nothing moved for longer than the limit of the phase, and the stacks fit no known kind of hang.",
        fix="Read the two stacks of each process in the run directory: frames that are the same in both are where "
        "it waits.",
        example="",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id=HUNG_UP,
        title="the terminal was closed",
        family="preempted",
        patterns=(r"^Hangup$", r"^\S+: line \d+:\s+\d+ Hangup\b"),
        rank=80,
        restart="retry",
        means="The process ended by SIGHUP: its terminal or its ssh connection was closed.",
        fix="Start long runs under `tmux`, `nohup`, `setsid` or a scheduler.",
        example="Hangup",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id=OTHER_SIGNAL,
        title="ended by a signal",
        family="crash",
        patterns=(
            r"^(?:Illegal instruction|Floating point exception|Trace/breakpoint trap)(?: \(core dumped\))?$",
            r"^Fatal Python error: (?:Illegal instruction|Floating[- ]point exception)",
            r"^CPU time limit exceeded(?: \(core dumped\))?$",
        ),
        rank=80,
        means="A signal ended the process that neither memory nor a crash explains: an instruction that this "
        "processor does "
        "not have, a limit of processor time, or a division in native code.",
        fix="Look up the signal. For SIGILL install a build for this processor; for SIGXCPU raise `ulimit -t`.",
        example="Illegal instruction (core dumped)",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id=CHILD_FAILED,
        title="a launcher's child failed without a word",
        family="unknown",
        patterns=(
            r"^Command '?\[?.{1,2000}returned non-zero exit status \d+",
            r"^Command '?\[?.{1,2000}died with <Signals\.\w+: \d+>",
        ),
        role="cascade",
        rank=92,
        means="A launcher reports that a process which it had started failed, and the text of that process is not "
        "here.",
        fix="Look for the log of that process or rank: `torchrun --log-dir`, `TORCHELASTIC_ERROR_FILE`, or the "
        "output of the "
        "node on which it ran.",
        example="subprocess.CalledProcessError: Command '['/usr/bin/python', 'train.py']' returned non-zero exit "
        "status 1.",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id=SUPERVISOR_LOST,
        title="the supervisor was killed",
        family="preempted",
        patterns=(),
        rank=80,
        restart="retry",
        means="The process of `holdfast run` itself was killed, and with it the command, so that nothing was left "
        "behind: "
        "by SIGKILL of a person or a scheduler, or by the kernel for memory.",
        fix="Ask the scheduler or `dmesg` why it was killed, then start the same command again.",
        example="",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id=TRAINING_LOST,
        title="its training was lost",
        family="numerics",
        patterns=(),
        rank=90,
        means="The command came to its end, but until then its loss or its gradients were NaN or infinite, or the "
        "loss had risen to more than a million times its best level. What it trained is of no use.",
        fix="Do not use what it saved since then. Start it again under `holdfast.watch`, which names the batch and "
        "the layer where the first value was not finite, or train with a Guard, which skips such steps and goes back "
        "to a good checkpoint; `torch.autograd.set_detect_anomaly(True)` names the operation of the forward pass. "
        "For a loss that exploded, lower the learning rate first.",
        false_positives="A program that raises the scale of its loss a million times, or prints something else "
        "under that name.",
        example="",
        seen="reproduced on torch 2.13",
    ),
)
