"""`holdfast run -- COMMAND`: arguments and options. ``supervised`` runs the command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.checkpoint.mirror.location import open_location
from holdfast.cli.output import failing_clearly
from holdfast.cli.supervised import supervise
from holdfast.core.errors import PolicyError
from holdfast.core.secrets import SecretUrl
from holdfast.supervise.launch.restarts import Budgets
from holdfast.supervise.watch.limits import HangLimits

_Command = Annotated[
    list[str],
    typer.Argument(
        metavar="COMMAND", help="The command to run, such as: -- python train.py --lr 0.1"
    ),
]
_RunDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="The run directory. Default: runs/<script>-<UTC time>.",
        show_default=False,
    ),
]
_MaxRestarts = Annotated[
    int,
    typer.Option(min=0, metavar="N", help="Maximum number of restarts after failures."),
]
_MaxPreemptions = Annotated[
    int,
    typer.Option(min=0, metavar="N", help="Maximum number of restarts after preemptions."),
]
_RestartDelay = Annotated[
    float,
    typer.Option(
        min=0,
        metavar="SECONDS",
        help="Seconds before the first restart. The delay doubles each time, up to 5 minutes.",
    ),
]
_HangLimits = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PHASE=SECONDS",
        help=(
            "Maximum time without progress in a phase, or in every phase (all=SECONDS)."
            " moving=SECONDS: how long to keep a process running that computes without progress."
            " SECONDS may be 'off'. May be repeated."
        ),
    ),
]
_NoWatchdog = Annotated[bool, typer.Option("--no-watchdog", help="Do not detect hangs and leaks.")]
_NoObserve = Annotated[
    bool,
    typer.Option("--no-observe", help="Do not observe the command's Python processes from inside."),
]
_GraceSeconds = Annotated[
    float,
    typer.Option(
        min=0,
        metavar="SECONDS",
        help="Seconds between SIGINT or SIGTERM and SIGKILL. Schedulers usually allow 30 s.",
    ),
]
_MaxLogBytes = Annotated[
    int,
    typer.Option(
        min=1 << 20,
        metavar="BYTES",
        help="Maximum size of output.log. Above it, the middle of the log is dropped.",
    ),
]
_Requeue = Annotated[
    bool,
    typer.Option(
        "--requeue",
        help=(
            "Ask Slurm to requeue the job after the training script has stopped because its time"
            " is nearly over, or on SIGUSR1 or SIGUSR2."
        ),
    ),
]
_Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help=(
            "Save and resume the training script, which need not import holdfast. The run directory"
            " is runs/<script> by default, so that the same command continues the run."
        ),
    ),
]
_Notify = Annotated[
    str | None,
    typer.Option(
        metavar="URL|COMMAND",
        help=(
            "Send a message when the run ends, fails, restarts or hangs, and on NaN and low disk"
            " space: to an http(s):// webhook (ntfy, Slack and Discord are recognized), or with a"
            " command, which is run without a shell. Default: the variable HOLDFAST_NOTIFY."
        ),
        show_default=False,
    ),
]
_Mirror = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help=(
            "Copy the newest checkpoints there while the script trains, and resume from there on"
            " another machine: s3://bucket/run, gs://..., or the path of another disk. The script"
            " uses a Guard, or --resume."
        ),
        show_default=False,
    ),
]
_Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the command's own output.")]
_AsJson = Annotated[
    bool,
    typer.Option(
        "--json", help="Print a JSON summary on stdout. The output of COMMAND goes to stderr."
    ),
]


def run(
    command: _Command,
    run_dir: _RunDir = None,
    max_restarts: _MaxRestarts = 3,
    max_preemptions: _MaxPreemptions = 10,
    restart_delay: _RestartDelay = 10.0,
    hang_limit: _HangLimits = None,
    no_watchdog: _NoWatchdog = False,
    no_observe: _NoObserve = False,
    grace_seconds: _GraceSeconds = 25.0,
    max_log_bytes: _MaxLogBytes = 256 << 20,
    requeue: _Requeue = False,
    resume: _Resume = False,
    notify: _Notify = None,
    mirror: _Mirror = None,
    quiet: _Quiet = False,
    as_json: _AsJson = False,
) -> None:
    """Run a command, watch it, restart it if that can help, and explain why it ended.

    The exit code is that of the command, or 128 + n if signal n ended it. 127 or 126: the command
    cannot be executed. 2: incorrect usage, or --resume does not support the script. 75: Slurm did
    not requeue the job.
    """
    with failing_clearly(as_json=as_json):
        limits = HangLimits.parse(hang_limit or [])
        if resume and no_observe:
            raise PolicyError(
                "--resume with --no-observe",
                limit="the script is saved and resumed by the observer in its process",
                fix="omit one of the two options.",
                rule="H737",
            )
        if mirror is not None:
            # A wrong URL is reported here, and not by each attempt of the script.
            open_location(SecretUrl(mirror))
            if "://" not in mirror:
                # The script may change its working directory, as Hydra does.
                mirror = str(Path(mirror).expanduser().absolute())
    budgets = Budgets(
        max_restarts=max_restarts,
        max_preemptions=max_preemptions,
        first_delay_seconds=restart_delay,
    )
    supervise(
        command,
        run_dir,
        quiet=quiet,
        as_json=as_json,
        budgets=budgets,
        hang_limits=None if no_watchdog or no_observe else limits,
        observe=not no_observe,
        grace_seconds=grace_seconds,
        max_log_bytes=max_log_bytes,
        requeue=requeue,
        resume=resume,
        notify=notify,
        mirror=mirror,
    )
