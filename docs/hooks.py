"""What mkdocs calls while it builds the site.

Pages and tables made from the code, and links that leave docs/.

A page of docs/ may hold a directive, an HTML comment on a line of its own that other readers of the
file do not see:

    <!-- rules -->      every rule of the catalogue with its title, and a link to its text
    <!-- policy -->     every field of `Policy`
    <!-- presets -->    every preset
    <!-- events -->     every kind of event with its fields
    <!-- commands -->   every command with its arguments and options
    <!-- modules -->    every module with the first sentence of its docstring
    <!-- faults -->     what faults do to a training in each framework
    <!-- scoreboard --> the same campaign of `holdfast chaos` over each framework
    <!-- fixes tried --> which fixes of signatures were tried, and how
    <!-- fixes found --> where the other fixes come from
    <!-- fixes open -->  which fixes are neither
    <!-- figures: NAME  these figures of benchmarks/results/NAME.json, a line each; * is any text;
    ...                 without a line: those with something to reach, and what was measured beside
                        them
    -->

The rules have a page for each family (``rule_pages.py``). A link to ``rules.md#h108`` leads to H108
on its page.

READMEs and other pages that lie elsewhere in the repository become pages of the site, and links to
them lead there. A link to a file that is no page, such as a script, keeps its words and leads
nowhere: the site is read without the repository. A link to a file that does not exist is a warning,
which strict mode makes an error.
"""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
import json
import logging
import posixpath
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import griffe
from mkdocs.structure.files import File

if TYPE_CHECKING:
    from docs.rule_pages import RulePage

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# Results of the only look at programs that were held out: they describe the rules of that day and
# are never measured again.
FIRST_LOOKS = frozenset(
    {
        "first_looks",
        "not_learning_held_out_2",
        "not_learning_held_out_3",
        "not_learning_unseen_1",
        "not_learning_unseen_2",
        "world_first_look",
    }
)
RECIPES = (
    "tacotron2",
    "gan",
    "pegasus",
    "classifier",
    "separation",
    "asr",
    "gpt",
    "lora",
    "diffusion",
    "demo",
)
# Pages whose text lies elsewhere in the repository, by their place in the site.
FROM_ELSEWHERE = {
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "benchmarks.md": "benchmarks/README.md",
    **{f"recipes/{name}.md": f"recipes/{name}/README.md" for name in RECIPES},
}
# Where links to these lead instead.
STAND_INS = {
    **{source: page for page, source in FROM_ELSEWHERE.items()},
    "benchmarks": "benchmarks.md",
    "benchmarks/results": "figures.md",
    "benchmarks/results/README.md": "figures.md",
    "src/holdfast/explain/rules.md": "rules.md",
    **{f"recipes/{name}": f"recipes/{name}.md" for name in RECIPES},
}
_DIRECTIVE = re.compile(
    r"^<!-- (rules|policy|presets|events|commands|modules|faults|scoreboard|fixes \w+|figures:"
    r" (?P<given>.*?))\s-->$",
    re.MULTILINE | re.DOTALL,
)
_LINK = re.compile(
    r"(?P<bang>!?)\[(?P<words>[^\]]*)\]\((?P<target>[^)\s#]*)(?P<anchor>#[^)\s]*)?\)"
)
_FENCED = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
_log = logging.getLogger("mkdocs.hooks.holdfast")

# --- what mkdocs calls


def on_startup(**_: Any) -> None:
    """Make ``benchmarks`` importable: it is a package of the repository, and not installed."""
    sys.path.insert(0, str(ROOT))


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of rules, those whose text lies elsewhere, and ``llms.txt``."""
    for page, source in FROM_ELSEWHERE.items():
        files.append(
            File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8"))
        )
    from docs.rule_pages import PAGES

    for rules_page in PAGES:
        files.append(File.generated(config, rules_page.uri, content=rule_page(rules_page)))
    for_assistants = (ROOT / "llms.txt").read_text(encoding="utf-8")
    files.append(File.generated(config, "llms.txt", content=for_assistants))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Carry out the directives of a page, and lead its links to where the pages are."""
    uri = page.file.src_uri
    source = FROM_ELSEWHERE.get(uri, f"docs/{uri}")
    return redirected(expanded(markdown), source=source, page=uri)


class Doctests(griffe.Extension):
    """Has the examples of docstrings drawn as Python.

    Griffe knows the heading ``Examples`` only.
    """

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the heading of a docstring."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")


def tables_of_figures() -> str:
    """Return docs/figures.md with its tables, for who reads the repository.

    Kept as benchmarks/results/README.md.

    ``python docs/hooks.py`` writes it.
    """
    page = expanded((ROOT / "docs" / "figures.md").read_text(encoding="utf-8"))
    return page.replace("](../benchmarks/", "](../").replace("](guide/", "](../../docs/guide/")


# --- directives


def expanded(markdown: str) -> str:
    """Return a page with its directives carried out."""
    made: dict[str, Callable[[], str]] = {
        "rules": rules,
        "policy": policy_table,
        "presets": presets_table,
        "events": events_table,
        "commands": commands,
        "modules": modules,
        "faults": faults_table,
        "scoreboard": scoreboard_table,
        "fixes tried": fixes_tried,
        "fixes found": fixes_found,
        "fixes open": fixes_open,
    }

    def one(match: re.Match[str]) -> str:
        if match["given"] is None:
            return made[match[1]]()
        name, *wanted = match["given"].strip().splitlines()
        return figures(name.strip(), [line.strip() for line in wanted])

    return _DIRECTIVE.sub(one, markdown)


def rules() -> str:
    """Return a table for each page of rules: their ids, their titles, and links to their texts."""
    from docs.rule_pages import PAGES, rules_of

    from holdfast.explain.rules import catalogue

    lines = []
    for page in PAGES:
        lines += [f"## [{page.title}]({page.uri})\n", "| rule | |", "|---|---|"]
        for rule_id in rules_of(page):
            anchor = rule_id.lower()
            link = f'<span id="{anchor}"></span>[{rule_id}]({page.uri}#{anchor})'
            lines.append(f"| {link} | {_cell(catalogue()[rule_id].title)} |")
        lines.append("")
    return "\n".join(lines)


def rule_page(page: RulePage) -> str:
    """Return a page with the texts of its rules."""
    from docs.rule_pages import rules_of

    from holdfast.explain.rules import catalogue

    lines = [f"# {page.title}\n"]
    for rule_id in rules_of(page):
        rule = catalogue()[rule_id]
        lines.append(
            f"## {rule_id}: {_as_text(rule.title)}"
            f" {{#{rule_id.lower()}}}\n\n{_as_text(rule.text)}\n"
        )
    return "\n".join(lines)


def policy_table() -> str:
    """Return a table of the policy's fields.

    Name, type, default, meaning with the source of the default.
    """
    from holdfast.core.policy import policy
    from holdfast.core.policy import sources as policy_sources

    meanings = policy_sources.meanings_of(Path(policy.__file__), "Policy")
    rows = [
        f'| <span id="{field.name}"></span>`{field.name}` | `{field.default!r}` |'
        f" {_cell(meanings[field.name])} |"
        for field in dataclasses.fields(policy.Policy)
    ]
    return "\n".join(["| field | default | meaning |", "|---|---|---|", *rows])


def presets_table() -> str:
    """Return a table of the presets' settings, each with its source."""
    from holdfast.core.policy.presets import presets

    lines = ["| preset | field | value | source |", "|---|---|---|---|"]
    for preset in presets().values():
        for number, (name, setting) in enumerate(preset.settings.items()):
            shown = f"`{preset.name}`" if number == 0 else ""
            lines.append(f"| {shown} | `{name}` | `{setting.value!r}` | {_cell(setting.source)} |")
    return "\n".join(lines)


def events_table() -> str:
    """Return a table of the kinds of events: kind, fields with their types, what it means."""
    from holdfast.core.events import decisions, process_events, run_events
    from holdfast.core.events.event import event_kinds

    lines = ["| kind | fields | meaning |", "|---|---|---|"]
    for module in (run_events, decisions, process_events):
        for kind, each in event_kinds().items():
            if each.__module__ == module.__name__:
                fields = ", ".join(
                    f"`{field.name}: {field.type}`" for field in dataclasses.fields(each)
                )
                meaning = _cell(str(each.__doc__).partition("\n\n")[0])
                lines.append(f'| <span id="{kind}"></span>`{kind}` | {fields} | {meaning} |')
    return "\n".join(lines)


def commands() -> str:
    """Return a section for each command.

    What it does, how it is called, its arguments and options.
    """
    import typer

    from holdfast.cli.main import COMMANDS, make_app

    group: Any = typer.main.get_command(make_app())
    parts = [_as_text(group.help)]
    for name in COMMANDS:
        command = group.commands[name]
        context = command.make_context(name, [], resilient_parsing=True)
        usage = " ".join(["holdfast", name, *command.collect_usage_pieces(context)])
        told = [parameter.get_help_record(context) for parameter in command.params]
        rows = [f"| `{call}` | {_cell(meaning)} |" for call, meaning in filter(None, told)]
        table = ["| argument or option | meaning |", "|---|---|", *rows]
        parts.append(
            f"## {name}\n\n```sh\n{usage}\n```\n\n{_as_text(command.help)}\n\n" + "\n".join(table)
        )
    return "\n\n".join(parts)


def figures(name: str, wanted: list[str]) -> str:
    """Return a table of some figures of one result file.

    Args:
        name: Of the file, without its ending.
        wanted: Words of the figures, in order; ``*`` is any text. None: those that `is_shown`
            chooses.

    Raises:
        LookupError: if there is no such figure, or no such file.
    """
    from benchmarks.tables import is_shown, row

    file = RESULTS / f"{name}.json"
    if not file.exists():
        raise LookupError(f"benchmarks/results has no {name}.json")
    result = json.loads(file.read_text(encoding="utf-8"))
    chosen = [] if wanted else [each for each in result["figures"] if is_shown(name, each)]
    for pattern in wanted:
        found = [each for each in result["figures"] if fnmatch.fnmatchcase(each["what"], pattern)]
        if not found:
            raise LookupError(f"{name}.json has no figure {pattern!r}")
        chosen += found
    where = f"`{name}`, {result['date'][:10]}, commit {str(result['commit']['commit'])[:9]}"
    lines = [
        f"| {where} | measured | to reach |",
        "|---|---|---|",
        *(f"| {row(each)} |" for each in chosen),
    ]
    if name in FIRST_LOOKS:
        lines += ["", "The first and only look at these programs; the rules have changed since."]
    return "\n".join(lines)


def modules() -> str:
    """Return a table of each package's modules with the first sentence of their docstrings."""
    package = ROOT / "src" / "holdfast"
    lines: list[str] = []
    folder = None
    for file in sorted(package.rglob("*.py"), key=lambda each: (each.parent, each.name)):
        docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        sentence = " ".join(docstring.split("\n\n")[0].split())
        if file.parent != folder:
            folder = file.parent
            lines += [
                "",
                f"### {folder.relative_to(package.parent)}",
                "",
                "| module | holds |",
                "|---|---|",
            ]
        if file.name != "__init__.py":
            lines.append(f"| `{file.stem}` | {_cell(sentence)} |")
    return "\n".join(lines)


def faults_table() -> str:
    """Return the table of what faults do in frameworks."""
    from benchmarks.tables import faults_table

    return faults_table(RESULTS)


def scoreboard_table() -> str:
    """Return the table of what came of each kind of fault in each framework, alone and with
    holdfast.
    """
    result = json.loads((RESULTS / "scoreboard.json").read_text(encoding="utf-8"))
    words = {
        "does not survive": "**dies**",
        "hangs": "**hangs**",
        "ends in NaN": "**NaN**",
        "work is lost": "*lost*",
    }
    words |= {"another training": "*another*", "survives": "exact"}  # after a NaN that was left out
    kinds = result["parameters"]["kinds"]
    lines = [f"| | {' | '.join(kinds)} | same | again | seconds |", "|---" * (len(kinds) + 4) + "|"]
    for title, rows in sorted(result["samples"].items()):
        met = [row for row in rows if row["tried"]]
        cells = []
        for kind in kinds:
            shown = [
                (
                    "exact¹"
                    if "the last save into" in row["detail"]
                    else words.get(row["result"], row["result"])
                )
                for row in met
                if row["kind"] == kind
            ]
            found = Counter(shown)
            cells.append(
                ", ".join(
                    f"{count} {word}" if len(found) > 1 else word for word, count in found.items()
                )
            )
        same, again = sum(row["passed"] for row in met), sum(row["steps_again"] for row in met)
        lost = sum(row["seconds_lost"] for row in met)
        lines.append(
            f"| {title} | {' | '.join(cells)} | {same} of {len(met)} | {again} | {lost:.0f} |"
        )
    where = f"`scoreboard`, {result['date'][:10]}, commit {result['commit']['commit'][:9]}"
    return "\n\n".join(["\n".join(lines), where, *result["notes"]])


def fixes_tried() -> str:
    """Return a table of the signatures whose fix was tried: what failed, and what was applied."""
    from evals.fixes import recorded_outcomes

    from holdfast.explain.signatures import all_signatures

    lines = ["| signature | the part of the fix that was applied |", "|---|---|"]
    for outcome in recorded_outcomes():
        if outcome.recognized and outcome.helped:
            signature = all_signatures()[outcome.case.signature_id]
            lines.append(
                f"| {_signature_cell(signature.id, signature.title)} |"
                f" {_cell(outcome.case.tried)} |"
            )
    return "\n".join(lines)


def fixes_found() -> str:
    """Return a table of the signatures whose fix has a source: the page, and what it says."""
    from evals.fixes import all_sources

    from holdfast.explain.signatures import all_signatures

    lines = ["| signature | source | what it says about the fix |", "|---|---|---|"]
    for source in all_sources():
        signature = all_signatures()[source.signature_id]
        host = source.url.split("/")[2]
        lines.append(
            f"| {_signature_cell(signature.id, signature.title)} | [{host}]({source.url}) |"
            f" {_cell(source.says)} |"
        )
    return "\n".join(lines)


def fixes_open() -> str:
    """Return a table of the signatures whose fix is neither tried nor has a source, and why."""
    from evals.fixes import open_signatures

    from holdfast.explain.signatures import all_signatures

    lines = ["| signature | why |", "|---|---|"]
    for signature_id, reason in open_signatures().items():
        signature = all_signatures()[signature_id]
        lines.append(f"| {_signature_cell(signature.id, signature.title)} | {_cell(reason)} |")
    return "\n".join(lines)


def _signature_cell(signature_id: str, title: str) -> str:
    return f"[{signature_id}](../rules.md#{signature_id.lower()}) {_cell(title)}"


# --- text


def redirected(markdown: str, *, source: str, page: str) -> str:
    """Return a page whose links lead to pages of the site, or are no links any more.

    Args:
        markdown: Of the page; its links are relative to `source`.
        source: Where the text lies in the repository.
        page: Where the page lies in the site's sources.
    """
    from docs.rule_pages import page_of

    def one(match: re.Match[str]) -> str:
        target, anchor = match["target"], match["anchor"] or ""
        if not target and page.startswith("rules/"):
            # The texts of rules refer to each other as if all were on one page.
            target = "../rules.md"
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        place = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if place in STAND_INS or place.startswith("docs/"):
            uri = STAND_INS.get(place) or place.removeprefix("docs/")
            if uri == "rules.md" and anchor:
                uri = page_of(anchor.removeprefix("#").upper()).uri
            to = posixpath.relpath(uri, posixpath.dirname(page) or ".")
            return f"{match['bang']}[{match['words']}]({to}{anchor})"
        if not (ROOT / place).exists():
            _log.warning("%s links to %s, which does not exist", source, place)
        return match["words"]

    return "".join(
        part if code else _LINK.sub(one, part) for part, code in _pieces(markdown, _FENCED)
    )


def _pieces(text: str, code: re.Pattern[str]) -> Iterator[tuple[str, bool]]:
    """Yield the text in pieces, and for each whether it is code."""
    for number, part in enumerate(code.split(text)):
        yield part, number % 2 == 1


def _as_text(text: str) -> str:
    """Return a text of ours in which ``<`` outside of code is no tag."""
    lines = "".join(
        part if code else part.replace("<", "&lt;") for part, code in _pieces(text.strip(), _CODE)
    )
    return re.sub(
        r"^    .*$", lambda line: line[0].replace("&lt;", "<"), lines, flags=re.MULTILINE
    )  # code by indentation


def _cell(text: str) -> str:
    """Return a text for a cell of a table: one line, no bars."""
    return _as_text(" ".join(text.split())).replace("|", "\\|")


if __name__ == "__main__":
    on_startup()
    (RESULTS / "README.md").write_text(tables_of_figures(), encoding="utf-8")
