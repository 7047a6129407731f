"""`holdfast report RUN`: one HTML page of a run that opens offline."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.output import Json, failing_clearly, print_json
from holdfast.core.durable import replace_file


def run(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, such as runs/last.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The page; else report.html in RUN.")] = None,
    show: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
    as_json: Json = False,
) -> None:
    """Write one page that says why a run ended and how it went; it needs no network."""
    with failing_clearly(as_json=as_json):
        from holdfast.report.gathering import gather  # here, since numpy takes a tenth of a second to import
        from holdfast.report.page import render
        from holdfast.report.sources import check_run

        picture = gather(check_run(run_dir))
        page = (out or picture.path / "report.html").absolute()
        data = render(picture).encode()
        try:
            replace_file(page, data)
        except OSError as error:
            why = f"the page cannot be written here ({error.strerror}); --out FILE takes another place"
            raise OSError(error.errno, why, str(page)) from error
    opened = show and webbrowser.open(page.as_uri())
    if as_json:
        print_json(
            {
                "page": str(page),
                "bytes": len(data),
                "opened": opened,
                "processes": len(picture.processes),
                "curves": len(picture.lanes),
                "events": len(picture.events),
                "problems": list(picture.problems),
            }
        )
        return
    typer.echo(f"wrote {page} ({len(data) / 2**20:.1f} MiB)")
    for problem in picture.problems:
        typer.echo(f"note: {problem}", err=True)
