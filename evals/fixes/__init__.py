"""Fixes of signatures, tried: programs that fail, and the same programs with the fix applied.

``cases.yaml`` names the cases. The programs of a case are in ``programs/<name of the case>``:
``fails.py`` and ``fixed.py``, or one ``train.py`` if the fix is not in the program but in how it is
started. ``sources.yaml`` names where the fix comes from for signatures whose failure cannot be
produced on one machine without a GPU, and lists the signatures that are still open.

``python -m evals.fixes`` runs the cases, as ``running`` describes, and keeps the end of their
outputs in ``recorded.jsonl``.
"""

from __future__ import annotations

import ast
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from holdfast.explain.signatures import all_signatures
from holdfast.explain.signatures.signature import NO_FAILURES

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
RECORDED = HERE / "recorded.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One program that fails, and the fix that is tried on it.

    Args:
        name: The id of the signature, with a suffix if it has several cases: ``H978-entry``.
        tried: The part of the signature's fix that was applied, word for word.
        fails: The shell command that fails.
        fixed: The shell command with the fix.
        explain: What to explain: the file with the output, or a run directory.
        silent: Whether the output says nothing, so that the exit status is needed for the verdict.
        fixed_cause: The verdict on the fixed program if it is not that the run ended well: some
            fixes only make visible what went wrong.
    """

    name: str
    tried: str
    fails: str = "python fails.py"
    fixed: str = "python fixed.py"
    explain: str = "output.log"
    silent: bool = False
    fixed_cause: str | None = None

    @property
    def signature_id(self) -> str:
        """The id of the signature whose fix is tried."""
        return self.name.partition("-")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the fix of a signature comes from that could not be tried.

    Args:
        signature_id: The id of the signature.
        url: A page of documentation or a thread of an issue.
        says: What the page says about the fix, in one sentence.
    """

    signature_id: str
    url: str
    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What came of one command.

    Args:
        output: The end of its output, with neutral paths.
        status: Its exit status, negative for a signal.
        cause: The id of the verdict on the output or on the run directory.
        title: The verdict's title.
        family: The class of the verdict's cause.
    """

    output: str
    status: int
    cause: str
    title: str
    family: str

    @property
    def ended_well(self) -> bool:
        """Whether the command succeeded, and the verdict agrees."""
        return self.status == 0 and self.family in NO_FAILURES


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a case: whether it failed as its signature says, and whether the fix helped."""

    case: Case
    failing: Run
    fixed: Run

    @property
    def recognized(self) -> bool:
        """Whether the verdict on the failing program is the signature of the case."""
        return self.failing.cause == self.case.signature_id

    @property
    def helped(self) -> bool:
        """Whether the program with the fix ends well."""
        if self.case.fixed_cause is not None:
            return self.fixed.cause == self.case.fixed_cause
        return self.fixed.ended_well and self.fixed.cause != self.case.signature_id


def all_cases() -> list[Case]:
    """Return the cases in ``cases.yaml``."""
    entries = yaml.safe_load((HERE / "cases.yaml").read_text(encoding="utf-8"))
    return [Case(name=name, **fields) for name, fields in entries.items()]


def all_sources() -> list[Source]:
    """Return the sources in ``sources.yaml``."""
    entries = yaml.safe_load((HERE / "sources.yaml").read_text(encoding="utf-8"))["sources"]
    return [Source(signature_id=name, **fields) for name, fields in entries.items()]


def open_signatures() -> dict[str, str]:
    """Return the ids of signatures whose fix is neither tried nor has a source, with the reason."""
    text = (HERE / "sources.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text)["open"] or {})


def signatures_with_a_fix() -> list[str]:
    """Return the ids of the signatures that advise something."""
    return [
        signature.id
        for signature in all_signatures().values()
        if signature.fix and not signature.fix.startswith("Nothing needs to be done.")
    ]


def fingerprint(case: Case) -> str:
    """Return a hash that changes whenever the commands or the programs of a case do.

    The layout of the programs and their comments do not count.
    """
    content = hashlib.sha256(f"{case.fails}\0{case.fixed}\0{case.explain}".encode())
    for file in sorted((PROGRAMS / case.name).rglob("*.*")):
        text = file.read_text(encoding="utf-8")
        content.update(file.name.encode())
        content.update((ast.dump(ast.parse(text)) if file.suffix == ".py" else text).encode())
    return content.hexdigest()[:12]


def recorded_outcomes() -> list[Outcome]:
    """Return the recorded outcomes of those cases that have not changed since."""
    if not RECORDED.exists():
        return []
    cases = {case.name: case for case in all_cases()}
    outcomes = []
    for line in RECORDED.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        case = cases.get(entry["name"])
        if case is not None and entry["fingerprint"] == fingerprint(case):
            failing, fixed = Run(**entry["failing"]), Run(**entry["fixed"])
            outcomes.append(Outcome(case=case, failing=failing, fixed=fixed))
    return outcomes


def record(outcome: Outcome) -> None:
    """Keep an outcome, in the place of an earlier one of the same case."""
    outcomes = {other.case.name: other for other in recorded_outcomes()}
    outcomes[outcome.case.name] = outcome
    lines = [
        json.dumps(
            {
                "name": case.name,
                "fingerprint": fingerprint(case),
                "failing": asdict(outcomes[case.name].failing),
                "fixed": asdict(outcomes[case.name].fixed),
            }
        )
        for case in all_cases()
        if case.name in outcomes
    ]
    RECORDED.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
