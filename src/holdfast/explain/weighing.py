"""Candidates for the cause of a failure, from statements, and their order.

Every statement that a signature fits is a candidate, and so is every exception that none fits: of a
    chain of
exceptions, one. How much it counts:

    tier 0  an exception that is known to have ended its process, or what a Guard stopped for
    tier 1  a traceback after which the process did not go on; a line about hardware or a killing
    kernel tier 2  the last line of a traceback alone, or an exception that a logger printed tier 3
    any other line after which the process did not go on; the newest traceback of a process that
    left its main
            module, where lines of progress after it can have waited in a buffer
    tier 4  what was caught, warned of, or followed by progress: a cause only where nothing else is

Does not: look at how processes ended (see ``runtime_causes``), or choose (see ``judging``).
"""

from __future__ import annotations

import collections
import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Literal, NamedTuple

from holdfast.explain.evidence import Facts, Frame, Statement, is_own_code
from holdfast.explain.logs.progress import is_progress
from holdfast.explain.logs.quick import QuickPattern
from holdfast.explain.rules import all_rules
from holdfast.explain.signature import Family, Signature
from holdfast.explain.signatures import all_signatures, endings, kinds_of_unknown

CAUGHT = 4
"""The last tier."""
_GENERIC_RANK = 90
# Hardware, memory, device asserts: they are the root also where they wrap something
_STRONG_RANK = 30
_LOUD_RANK = 20  # lines of the kernel, the driver or a scheduler about hardware and memory
# Of the kinds that only the type of an exception, or the library that raised it, suggests
_BY_TYPE = 97
_SPECIFIC_KIND = 91  # the last rank of the kinds that one line shows by itself
_HABIT = 4  # lines that differ only in numbers: a measure that is called an error
# Tracebacks that stand so close belong to one failure: a child's, then its parent's
_BURST_LINES = 150
_ONLY_REPEATS = frozenset(
    {"_RemoteTraceback", "RemoteTraceback", "ExceptionGroup", "BaseExceptionGroup"}
)
_TELLING = (  # words of a line that is an error, the surest first
    re.compile(
        r"\b(?:(?:fatal|internal|runtime|compile|system|os) error|FAIL(?:ED)?\b|FATAL\b|error"
        r" (?:code|#)|error[:=<])"
        r"|\*ERROR\*|\bterminate called after\b|\bassertion\b.{0,300}\bfailed\b|\bCheck failed:"
        r" |^error\b",
        re.IGNORECASE,
    ),
    re.compile(
        r"\b(?:failed|cannot|can't|could not|couldn't|unable to|denied|not found|no"
        r" such|invalid|illegal|missing"
        r"|doesn't match|does not match|doesn't support|does not support|not"
        r" supported|unsupported|errors?|timed out"
        r"|Xid)\b",
        re.IGNORECASE,
    ),
    re.compile(
        r"\b(?:no longer|not"
        r" yet|exhausted|exceed(?:s|ed)|insufficient|failure|expected|undefined|must be|should be"
        r"|fault|segfault|crash(?:ed)?|too old|\w*conflict\w*|locked|forbidden|unauthorized|than is"
        r" available"
        r"|aren't available|pre-?empted by|interruption notice|refused|doesn't|does"
        r" not|assert|raise"
        r"|different (?:to|from|than))\b",
        re.IGNORECASE,
    ),
)
_COUNTS = re.compile(  # errors, or is data
    r"\b(?:0|no|zero|without) (?:failed|errors?|failures?)\b|\berrors\W{1,4}\d|\berror["
    r" _]rate\b|^\s*\{"
    r"|\bskip(?:ped|ping)\b|\b(?:INFO|DEBUG)\b|^srun: error: .{1,200}: Exited with exit code",
    re.IGNORECASE,
)
_WARNED = re.compile(r"\bWARN(?:ING)?\b")
# All that torch says of it, before it goes on without
_NO_CUDA = re.compile(r"Warning: CUDA initialization: ")
_OWN_RULE = re.compile(r"\[(H\d{3,4})\] run `holdfast explain")
_NAMED_FILE = re.compile(
    r"\bcannot import name .{1,300}\(([^()]{1,300}\.py)\)|\bconsider renaming '([^']+)' since"
)
_NO_ATTRIBUTE = re.compile(r"\bhas no attribute '(\w+)'")
Grounds = Literal[
    "own words",
    "signature",
    "symptom",
    "cascade",
    "words",
    "type",
    "open words",
    "line",
    "open line",
]
"""What a candidate rests on: an error of holdfast, which says what was found; a signature.

One of a family whose
failures mostly have their cause elsewhere; what follows from a failure elsewhere; the words of an
exception that no signature knows, with a class that they show, or that its type only suggests, or
without; the same of a line.
"""
SHARES: dict[Grounds, tuple[float, float]] = {
    "own words": (0.97, 0.97),
    "signature": (0.88, 0.98),
    "symptom": (0.48, 0.9),
    "cascade": (0.69, 0.89),
    "words": (0.65, 0.93),
    "type": (0.69, 0.75),
    "open words": (0.66, 0.0),
    "line": (0.55, 0.89),
    "open line": (0.46, 0.0),
}
"""By grounds: the shares of right causes and of right classes at the first looks at failures that
no rule was written from; ``python -m evals.world.calibrate`` prints them. The first is no count."""
_SYMPTOMS = frozenset({"out of memory", "crash", "device", "distributed", "autograd", "numerics"})
_SHARE_OF_CAUGHT = 0.5
# Characters that are searched: messages list keys of a state dict; no line of an error is so long.
_MOST_OF_A_MESSAGE = 20_000
_MOST_OF_A_LINE = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One possible cause."""

    signature: Signature  # what is known about it
    statement: Statement  # what it was seen in
    tier: int  # see the module
    chain: tuple[Statement, ...] = ()  # all exceptions of its chain, the root first
    # Other signatures that fit the same statements, the best first
    also: tuple[Signature, ...] = ()

    @property
    def generic(self) -> bool:
        """Return whether nearly everything could look like it."""
        return self.signature.rank >= _GENERIC_RANK

    @property
    def grounds(self) -> Grounds:
        """Return what it rests on."""
        signature = self.signature
        if signature.id in all_rules():
            return "own words"
        if signature.id == endings.ERROR_LINE:
            return "open line" if signature.family == "unknown" else "line"
        if signature.id == endings.UNCAUGHT:
            if signature.rank >= _BY_TYPE:
                return "type"
            return "open words" if signature.family == "unknown" else "words"
        if signature.role == "cascade":
            return "cascade"
        return "symptom" if signature.family in _SYMPTOMS else "signature"

    @property
    def confidence(self) -> float:
        """Return how sure the cause is, before it is compared with others and with how the
        process ended.
        """
        return SHARES[self.grounds][0] * (_SHARE_OF_CAUGHT if self.tier == CAUGHT else 1.0)

    @property
    def class_confidence(self) -> float:
        """Return the same of its class."""
        return SHARES[self.grounds][1] * (_SHARE_OF_CAUGHT if self.tier == CAUGHT else 1.0)


def find_candidates(facts: Facts) -> list[Candidate]:
    """Return every candidate, in the order of the statements."""
    found = []
    for chain in _chains(facts.statements):
        made = _of_own_rule(chain) or (
            _of_chain(chain) if chain[0].kind == "exception" else _of_line(chain[0])
        )
        if made is not None:
            found.append(made)
    said = [each for each in found if each.tier < CAUGHT and each.signature.role != "confirmation"]
    if all(each.signature.id == endings.ABORTED for each in said):
        telling = _telling_line(facts.statements, sure=bool(said))
        found += (
            [_candidate(_unknown(telling), telling, 3, (telling,))] if telling is not None else []
        )
    elif any(each.signature.id == endings.NCCL_FAILED for each in found):
        words = (
            each for each in facts.statements if "NCCL WARN" in each.text and not match_all(each)
        )
        found += [
            _candidate(_unknown(each), each, 3, (each,)) for each in itertools.islice(words, 1)
        ]
    return _without_early(found)


def _telling_line(statements: Sequence[Statement], *, sure: bool) -> Statement | None:
    """Return the line that reads most like an error, of those after the newest exception.

    None: none does.

    `sure`: only one with the surest words, and none that is a warning.
    """
    after = max((each.position for each in statements if each.kind == "exception"), default=-1)
    lines = [each for each in statements if each.kind == "line"]
    forms = collections.Counter(_form(each) for each in lines)
    found: list[tuple[tuple[bool, bool, int], Statement]] = []
    for each in (line for line in lines if line.position > after and line.fatal is None):
        if each.logged and (sure or not _NO_CUDA.search(each.text) or match_all(each)):
            continue
        telling = _TELLING[:1] if sure else _TELLING
        tier = next((tier for tier, words in enumerate(telling) if words.search(each.text)), None)
        counts = _COUNTS.search(each.text) is not None or is_progress(each.text)
        if tier is not None and not counts and forms[_form(each)] < _HABIT:
            known = any(kind.signature.rank <= _SPECIFIC_KIND for kind in _kinds_of(each))
            found.append(((_WARNED.search(each.text) is not None, not known, tier), each))
    late = [pair for pair in found if found[-1][1].position - pair[1].position <= _BURST_LINES]
    return min(late, key=lambda pair: pair[0], default=(None, None))[1]


def _form(line: Statement) -> str:
    return re.sub(r"\d+", "#", line.text)


def in_order(candidates: Iterable[Candidate], *, first_rank: int | None) -> list[Candidate]:
    """Return candidates of one role with the most likely root first.

    A launcher saw `first_rank` fail first.
    """
    given = list(candidates)
    timed = all(
        candidate.statement.unix_seconds is not None
        for candidate in given
        if candidate.tier < CAUGHT
    )

    def key(candidate: Candidate) -> tuple[float, ...]:
        statement = candidate.statement
        when = statement.unix_seconds if timed and statement.unix_seconds is not None else 0.0
        elsewhere = (
            first_rank is not None and statement.rank is not None and statement.rank != first_rank
        )
        if candidate.tier >= CAUGHT:  # of what did not end the run, the newest says most
            return (candidate.tier, candidate.generic, elsewhere, 0.0, -statement.position)
        return (candidate.tier, candidate.generic, elsewhere, when, statement.position)

    return sorted(given, key=key)


def _chains(statements: Sequence[Statement]) -> list[tuple[Statement, ...]]:
    found: list[tuple[Statement, ...]] = []
    chain: list[Statement] = []
    for statement in statements:
        chain.append(statement)
        if not statement.cause or statement.kind == "line":  # only exceptions lead to others
            found.append(tuple(chain))
            chain = []
    return found + ([tuple(chain)] if chain else [])


def _of_chain(chain: tuple[Statement, ...]) -> Candidate | None:
    """Return the candidate of a chain of exceptions: its root, as far as signatures know it."""
    matches = [match_all(statement) for statement in chain]
    best = [(index, fitting[0].signature) for index, fitting in enumerate(matches) if fitting]
    tier = _tier_of_exception(chain[-1])
    for each in chain:
        if file := _shadowing(each):
            known = all_signatures()[endings.SHADOWED]
            return _candidate(
                replace(known, title=f"{known.title}: {PurePath(file).name}"), each, tier, chain
            )

    def key(pair: tuple[int, Signature]) -> tuple[float, ...]:
        index, signature = pair
        return (
            signature.role != "root",
            signature.rank >= _GENERIC_RANK,
            signature.rank > _STRONG_RANK,
            index,
        )

    first = next(
        (index for index, each in enumerate(chain) if each.exception not in _ONLY_REPEATS), None
    )
    if best:
        index, signature = min(best, key=key)
        # What follows from a failure elsewhere is not the root of one that no signature knows.
        if signature.role == "root" or first is None or first >= index:
            others = {
                match.signature.id: match.signature
                for match in sorted(match for each in matches for match in each)
            }
            others.pop(signature.id)
            return _candidate(signature, chain[index], tier, chain, tuple(others.values()))
    if first is None:
        return None
    return _candidate(_unknown(chain[first]), chain[first], tier, chain)


def _shadowing(raised: Statement) -> str:
    """Return the user's file, beside the script, that an import found in place of another
    module; empty: none.
    """
    frames = [each for each in raised.frames if each.file[:1] != "<"]
    if (named := _NAMED_FILE.search(raised.text)) is not None:
        frames.append(Frame(file=named[1] or named[2], line=0, function="<module>"))
    for above, below in itertools.pairwise(frames):
        beside = PurePath(below.file).parent == PurePath(frames[0].file).parent and is_own_code(
            below
        )
        imports = above.function == below.function == "<module>"
        if beside and imports and (above.file == below.file or not is_own_code(above)):
            return below.file
    return ""


def _unknown(statement: Statement) -> Signature:
    """Return the words of an exception or a line as the cause, with the class that their kind
    shows, or with none.

    Of the user's code only where the exception was raised there.
    """
    signature = all_signatures()[
        endings.UNCAUGHT if statement.kind == "exception" else endings.ERROR_LINE
    ]
    kinds = _kinds_of(statement)
    own = bool(statement.frames) and is_own_code(statement.frames[-1])
    if kinds and not (own and kinds[0].signature.rank >= _BY_TYPE):
        kind = kinds[0].signature
        rank = max(kind.rank, _GENERIC_RANK)
        return replace(
            signature,
            family=kind.family,
            rank=rank,
            means=kind.means,
            fix=kind.fix,
            explains=kind.explains,
        )
    return replace(signature, family="user code" if own else "unknown")


def _of_line(statement: Statement) -> Candidate | None:
    fitting = [match.signature for match in match_all(statement)]
    if not fitting:
        return None
    tier = CAUGHT if statement.fatal is False or (statement.logged and not statement.fatal) else 3
    if tier == 3 and (fitting[0].rank <= _LOUD_RANK or statement.fatal):
        tier = 1
    return _candidate(fitting[0], statement, tier, (statement,), tuple(fitting[1:]))


def _candidate(
    signature: Signature,
    statement: Statement,
    tier: int,
    chain: tuple[Statement, ...],
    also: tuple[Signature, ...] = (),
) -> Candidate:
    return Candidate(signature=signature, statement=statement, tier=tier, chain=chain, also=also)


def _tier_of_exception(last: Statement) -> int:
    if last.fatal is not None:
        return 0 if last.fatal else CAUGHT
    return 1 if last.frames and not last.logged else 2


def _without_early(candidates: list[Candidate]) -> list[Candidate]:
    """Return candidates with tracebacks put into the last tier that stand before the one that ended
    a process.

    Two tracebacks of one process that nobody saw go on: the later ended it. The earlier belongs to
        it only if it
    stands close by, and nothing between them says that the run began again. One that was overtaken
    can be the cause only if no root came later.
    """
    begins: dict[int | None, int] = {}
    roots: set[int | None] = set()  # ranks of which a root came later
    found = []
    for candidate in reversed(candidates):
        statement = candidate.statement
        rank = statement.rank
        raised = statement.kind == "exception" and statement.source
        last = candidate.chain[-1] if candidate.chain else statement
        if raised and candidate.tier == 1:
            later = begins.get(rank)
            far = later is not None and later - statement.position > _BURST_LINES
            if far or (last.resumed and rank in roots):
                candidate = replace(candidate, tier=CAUGHT)
            else:
                begins[rank] = statement.position
        elif raised and last.overtaken and rank not in roots:
            candidate = replace(candidate, tier=3)
        if raised and candidate.tier < CAUGHT and candidate.signature.role == "root":
            roots.add(rank)
        found.append(candidate)
    return found[::-1]


# Follows from the failure of another, which may have left more than its text
_OF_ANOTHER_RANK = "H114"
# Families of our own errors, by the beginning of the rule.
_FAMILIES: tuple[tuple[str, Family], ...] = (
    (_OF_ANOTHER_RANK, "distributed"),
    ("H30", "storage"),
    ("H31", "checkpoint"),
    ("H403", "device"),
    ("H4", "out of memory"),
    ("H5", "numerics"),
    ("H6", "loader"),
)


def _of_own_rule(chain: tuple[Statement, ...]) -> Candidate | None:
    """Return the candidate for an error of holdfast itself, which names its rule.

    Of several, the outermost.
    """
    own = (
        (each, rule)
        for each in reversed(chain)
        if (rule := all_rules().get(_rule_named_in(each))) is not None
    )
    statement, rule = next(own, (chain[-1], None))
    if rule is None:
        return None
    signature = all_signatures().get(rule.id) or Signature(
        id=rule.id,
        title=rule.title,
        family=next(
            (family for begin, family in _FAMILIES if rule.id.startswith(begin)), "user code"
        ),
        rank=60,
        role="cascade" if rule.id == _OF_ANOTHER_RANK else "root",
        restart="retry" if rule.id == _OF_ANOTHER_RANK else "stop",
        means=_in_one_line(rule.text.split("\n\n")[0]),
        fix=_fix_of(statement.text) or _fix_of(rule.text),
    )
    if statement.kind == "exception":
        tier = _tier_of_exception(chain[-1])
    else:
        tier = 0 if statement.source == "guard" and statement.fatal else 3
    return _candidate(signature, statement, CAUGHT if statement.fatal is False else tier, chain)


def _rule_named_in(statement: Statement) -> str:
    """Return the id of the rule that a statement of holdfast names; an empty text for any other."""
    named = _OWN_RULE.search(statement.text)
    return statement.rule or (named[1] if named is not None else "")


def _fix_of(text: str) -> str:
    """Return what an error or a page of a rule says to do.

    As far as the id of the rule, or the next paragraph.
    """
    found = re.search(
        r"(?:^Fix: (.+?)(?=\n\[H\d|\n\n|\Z)|\*\*Fix\.\*\* (.+?)(?=\n\n|\Z))",
        text,
        re.MULTILINE | re.DOTALL,
    )
    return _in_one_line(found[1] or found[2]) if found else ""


def _in_one_line(text: str) -> str:
    return " ".join(text.split())


class Match(NamedTuple):
    """One signature that fits a statement; the smaller the order, the better it fits."""

    order: tuple[float, ...]
    signature: Signature


@dataclass(frozen=True, slots=True)
class _Compiled:
    signature: Signature
    patterns: tuple[QuickPattern, ...]
    frames: tuple[re.Pattern[str], ...]
    in_frames: tuple[tuple[QuickPattern, re.Pattern[str]], ...]

    def order(
        self, statement: Statement, texts: _Texts, places: Sequence[str]
    ) -> tuple[float, ...] | None:
        """Return how well the signature fits, or None if it does not."""
        signature, patterns = self.signature, self.patterns
        named = 0
        if statement.kind == "exception":
            if signature.exceptions and statement.exception not in (None, *signature.exceptions):
                return None
            if self.frames and not _any(self.frames, places):
                return None
            named = bool(signature.exceptions) + bool(self.frames)
            patterns += tuple(text for text, frame in self.in_frames if _any([frame], places))
        elif signature.only_exceptions:
            return None
        length = _matched(texts, patterns)
        if length is None:
            return None
        # One that names a class or frames knows more; then the longer text says more; at last the
        # id, to be definite.
        return (signature.rank, -named, -length, int(signature.id[1:]))


class _Catalogue:
    """Signatures, by the words without which they cannot fit."""

    def __init__(self, signatures: Iterable[Signature]) -> None:
        self._all = _compile(signatures)
        self._by_word: dict[str, list[int]] = collections.defaultdict(list)
        for index, each in enumerate(self._all):
            sought = [
                pattern.words for pattern in (*each.patterns, *(text for text, _ in each.in_frames))
            ]
            for word in frozenset().union(*sought) if all(sought) else {""}:
                self._by_word[word].append(index)

    def near(self, lowered: str) -> list[_Compiled]:
        """Return those of which a word is in a text in lower case, and those that need none."""
        found = {
            index for word, indices in self._by_word.items() if word in lowered for index in indices
        }
        return [self._all[index] for index in sorted(found)]


@functools.cache
def _compiled() -> _Catalogue:
    return _Catalogue(all_signatures().values())


@functools.cache
def _compiled_kinds() -> _Catalogue:
    return _Catalogue(kinds_of_unknown())


def _kinds_of(statement: Statement) -> list[Match]:
    return _matches(statement, _compiled_kinds())


def _compile(signatures: Iterable[Signature]) -> tuple[_Compiled, ...]:
    return tuple(
        _Compiled(
            signature=each,
            patterns=tuple(map(QuickPattern, each.patterns)),
            frames=tuple(re.compile(frame, re.IGNORECASE) for frame in each.frames),
            in_frames=tuple(
                (QuickPattern(text), re.compile(frame)) for text, frame in each.in_frames
            ),
        )
        for each in signatures
        if each.patterns or each.in_frames
    )


def match_all(statement: Statement) -> list[Match]:
    """Return every signature that fits a statement, the best first."""
    return _matches(statement, _compiled())


def _matches(statement: Statement, signatures: _Catalogue) -> list[Match]:
    texts = _texts_of(statement)
    places = [f"{frame.file}:{frame.function}" for frame in statement.frames]
    places += _innermost(statement)
    near = signatures.near("\n".join(lowered for _, lowered in texts))
    found = [(each.order(statement, texts, places), each.signature) for each in near]
    matches = [Match(order, signature) for order, signature in found if order is not None]
    return sorted(matches, key=lambda match: match.order)


def _innermost(statement: Statement) -> list[str]:
    """Return the place that failed, marked where it is own code, and asks `self` for an
    attribute that is missing.
    """
    # Which raises for others
    asked = [frame for frame in statement.frames if frame.function != "__getattr__"][-1:]
    missing = _NO_ATTRIBUTE.search(statement.text)
    name = re.compile(rf"\bself\.{missing[1]}\b" if missing else r"(?!)")
    marks = [" own" * is_own_code(each) + " self" * bool(name.search(each.code)) for each in asked]
    return [
        f"innermost {each.file}:{each.function}{mark}"
        for each, mark in zip(asked, marks, strict=True)
    ]


def _any(patterns: Iterable[re.Pattern[str]], places: Iterable[str]) -> bool:
    return any(pattern.search(place) for pattern in patterns for place in places)


_Texts = list[tuple[str, str]]  # each as it is, and in lower case


def _texts_of(statement: Statement) -> _Texts:
    """Return the texts in which patterns are sought, the first that fits counts."""
    texts = [
        statement.text[: _MOST_OF_A_MESSAGE if statement.kind == "exception" else _MOST_OF_A_LINE]
    ]
    if statement.exception is not None:
        texts.append(f"{statement.exception}: {texts[0]}" if texts[0] else statement.exception)
    if "\n" in texts[0]:  # who pasted it may have wrapped its lines
        texts.append(" ".join(texts[0].split()))
    elif statement.kind == "line" and statement.last:
        texts[0] += "\n"
    return [(text, text.lower()) for text in texts]


def _matched(texts: _Texts, patterns: tuple[QuickPattern, ...]) -> int | None:
    """Return how many characters the pattern that fits best covers, or None."""
    for text, lowered in texts:
        found = [
            match.end() - match.start()
            for pattern in patterns
            if (match := pattern.search(text, lowered)) is not None
        ]
        if found:
            return max(found)
    return None
