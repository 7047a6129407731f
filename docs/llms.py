"""Write ``llms.txt``: what an assistant needs to know to use holdfast for its user.

The commands and exit codes come from the code, the JSON schemas from ``docs/schemas``. Run
``python docs/llms.py`` after changing one of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "llms.txt"
SCHEMAS = ROOT / "docs" / "schemas"

_BEGINNING = """\
# holdfast

> A Python library and command-line tool for PyTorch. It keeps a training run alive, correct and
> within its memory, and explains why a run has failed. Linux only. Install it with `pip install .`
> in a clone of this repository.

- A run has failed: `holdfast explain RUN_OR_LOG --bundle` prints the evidence as Markdown of at
  most 4,000 tokens. Start there.
- A script cannot be changed: `holdfast run -- python train.py` supervises it. With `--resume`, the
  script is also saved and resumed.
- A loop can be changed: put a `holdfast.Guard` into it (docs/guide/guard.md).
- An error of holdfast ends with its id, such as `[H401]`. `holdfast explain H401` says what to do.
- Every command accepts `--json`. Stdout is then JSON and nothing else. In `holdfast run`, put it
  before `--`.
"""

_EXIT_CODES = """\
## Exit codes

- 0: success. 1: a check failed, such as a damaged checkpoint. 2: incorrect usage, or an error of
  holdfast.
- `holdfast run`: the exit code of the command; 128 + N if signal N ended it; 2 if it was not
  started; 74 if the newest state of a guarded run could not be saved.
- `holdfast save` and `holdfast stop`: 0 done; 1 not done within `--timeout`, or impossible; 2 no
  process holds the run.
- `holdfast explain` of a run, a log or a record: 0 if nothing failed. Otherwise, the class of the
  cause:
"""


def llms_txt() -> str:
    """Return the contents of ``llms.txt``."""
    parts = [_BEGINNING, _commands(), _exit_codes(), _json(), _pages()]
    return "\n".join(parts)


def _commands() -> str:
    """Return the usage, the summary and the options of each command."""
    import typer

    from holdfast.cli.main import COMMANDS, make_app

    group: Any = typer.main.get_command(make_app())
    lines = ["## Commands", ""]
    for name in COMMANDS:
        command = group.commands[name]
        context = command.make_context(name, [], resilient_parsing=True)
        usage = " ".join(["holdfast", name, *command.collect_usage_pieces(context)])
        summary = " ".join(command.help.partition("\n\n")[0].split())
        lines.append(f"- `{usage}`: {summary}")
        for parameter in command.params:
            record = parameter.get_help_record(context)
            if record is not None:
                call, meaning = record
                lines.append(f"  - `{call}`: {' '.join(meaning.split())}")
    return "\n".join([*lines, ""])


def _exit_codes() -> str:
    from holdfast.explain.signatures.signature import FAMILIES, NO_FAILURES

    failures = [
        f"{10 + number} {family}"
        for number, family in enumerate(FAMILIES)
        if family not in NO_FAILURES
    ]
    return f"{_EXIT_CODES}  {'; '.join(failures)}.\n"


def _json() -> str:
    """Return the JSON schema of each command's output, in one line each."""
    lines = ["## JSON", "", "JSON schemas (draft 2020-12). A later version may add fields.", ""]
    for path, schema in schemas():
        title = schema.pop("title")
        del schema["$schema"]
        lines += [f"- {title} (docs/schemas/{path.name}):", f"  `{json.dumps(schema)}`"]
    return "\n".join([*lines, ""])


def schemas() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the schemas and their files, in alphabetical order."""
    for path in sorted(SCHEMAS.glob("*.json")):
        yield path, json.loads(path.read_text(encoding="utf-8"))


def _pages() -> str:
    """Return the pages for users, with their titles."""
    lines = ["## Documentation", ""]
    for folder in ("guide", "how-to", "reference"):
        for path in sorted((ROOT / "docs" / folder).glob("*.md")):
            first_line = path.read_text(encoding="utf-8").partition("\n")[0]
            title = first_line.removeprefix("# ")
            if path.name != "README.md":
                lines.append(f"- [{title}](docs/{folder}/{path.name})")
    lines.append("- [All errors and causes](src/holdfast/explain/rules.md)")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    FILE.write_text(llms_txt(), encoding="utf-8")
