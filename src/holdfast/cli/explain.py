"""`holdfast explain H101`: what an error means, why it is one, and what to do."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.markdown import Markdown

from holdfast.cli.output import Json, console, failing_clearly, print_json
from holdfast.diagnose.rules import all_rules, find_rule


def run(
    rule: Annotated[
        str | None, typer.Argument(help="Id at the end of an error, such as H101; none lists all.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Explain a rule: what it means, why it matters, how to fix it."""
    with failing_clearly(as_json=as_json):
        found = list(all_rules().values()) if rule is None else [find_rule(rule)]
    if as_json:
        print_json([asdict(each) for each in found] if rule is None else asdict(found[0]))
    elif rule is None:
        for each in found:
            typer.echo(f"{each.id}  {each.title}")
    else:
        console().print(Markdown(f"# {found[0].id}: {found[0].title}\n\n{found[0].text}"))
