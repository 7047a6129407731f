"""`holdfast run -- COMMAND`: its arguments and options; ``supervised`` beside it carries it out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.output import failing_clearly
from holdfast.cli.supervised import supervise
from holdfast.supervise.launch.restarts import Budgets
from holdfast.supervise.watch.limits import HangLimits

_RunDir = Annotated[
    Path | None,
    typer.Option(help="Where to record. Default: runs/<script>-<UTC time>.", show_default=False),
]
_Delay = Annotated[
    float, typer.Option(min=0, help="Seconds before the first restart; doubled up to 5 minutes.")
]
_Limits = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PHASE=SECONDS",
        help=(
            "Longest stand-still of a phase, or of all of them (all=SECONDS); may be repeated."
            " moving=SECONDS: how long a process that still computes is left alone. SECONDS may be"
            " 'off'."
        ),
    ),
]
_Blind = Annotated[
    bool,
    typer.Option("--no-observe", help="Record nothing inside Python processes; nor watch them."),
]
_Grace = Annotated[
    float, typer.Option(min=0, help="From SIGINT or SIGTERM to SIGKILL. Schedulers leave 30 s.")
]
_Summary = Annotated[
    bool,
    typer.Option(
        "--json", help="Print a summary as JSON on stdout; what COMMAND prints goes to stderr."
    ),
]
_LogBytes = Annotated[
    int,
    typer.Option(
        min=1 << 20, help="Size of output.log; of more, the head and the newest part are kept."
    ),
]


def run(
    command: Annotated[
        list[str], typer.Argument(help="What to run, such as: -- python train.py --lr 0.1")
    ],
    run_dir: _RunDir = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Restarts in all, not counting preemptions.")
    ] = 3,
    max_preemptions: Annotated[
        int, typer.Option(min=0, help="Restarts after the command was taken back.")
    ] = 10,
    restart_delay: _Delay = 10.0,
    hang_limit: _Limits = None,
    no_watchdog: Annotated[
        bool, typer.Option("--no-watchdog", help="Do not look for hangs and leaks.")
    ] = False,
    no_observe: _Blind = False,
    grace_seconds: _Grace = 25.0,
    max_log_bytes: _LogBytes = 256 << 20,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print nothing but what the command prints.")
    ] = False,
    as_json: _Summary = False,
) -> None:
    """Run a command, watch it, start it again when that can help, and say why it ended.

    Exit code: that of the command; 128 + the number of the signal that ended it. 127 or 126: it
        cannot be executed.
    2: wrong use.
    """
    with failing_clearly(as_json=as_json):
        limits = HangLimits.parse(hang_limit or [])
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
        limits=None if no_watchdog or no_observe else limits,
        observe=not no_observe,
        grace_seconds=grace_seconds,
        most_log_bytes=max_log_bytes,
    )
