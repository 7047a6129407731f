"""The verdict: which of all that was seen is the cause, how sure it is, and when nothing is
claimed.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.core.events.event import Event
from holdfast.explain.causes.candidate import FALLBACKS
from holdfast.explain.certainty import CERTAINTIES
from holdfast.explain.collecting import collect_stream
from holdfast.explain.evidence import Ending, Evidence, Frame, Statement
from holdfast.explain.judging import judge
from holdfast.explain.rules import all_rules
from holdfast.explain.signatures import all_signatures, kinds_of_unknown
from holdfast.explain.signatures.signature import FAMILIES
from holdfast.explain.verdict import Verdict

# Most kinds have none.
FIXES_OF_KINDS = {kind.fix for kind in kinds_of_unknown()}
SHAPES = "mat1 and mat2 shapes cannot be multiplied (4x11 and 10x2)"
TIMEOUT = (
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE,"
    " Timeout(ms)=600000) ran for 600029 milliseconds before timing out."
)
OOM = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.65 GiB"
USER = '  File "/home/me/train.py", line 9, in step\n    model(x)\n'
TRACE = f"Traceback (most recent call last):\n{USER}"
GOING_ON = "".join(f"step {step} loss 0.5\n" for step in range(20))


def of_log(text: str, status: int | None = None) -> Verdict:
    return judge(collect_stream(io.BytesIO(text.encode()), name="a.log", status=status))


CASES = yaml.safe_load(Path(__file__).with_name("logs.yaml").read_text(encoding="utf-8"))


def filled(log: str) -> str:
    """Return the log of a case, with its parts and repeated lines put in."""
    while names := re.findall(r"\{(\w+)\}", log):
        for name in names:
            log = log.replace(f"{{{name}}}", CASES["parts"][name])

    def repeated(match: re.Match[str]) -> str:
        # An @ stands for a line break.
        lines = match[2].replace("@", "\n")
        return "".join(f"{lines.replace('#', str(number))}\n" for number in range(int(match[1])))

    return re.sub(r"\{(\d+) x ([^}]*)\}", repeated, log)


@pytest.mark.parametrize(
    "case", CASES["cases"], ids=lambda case: f"{case['shows'][:50]}: {case['log'][:30]}"
)
def test_a_log_that_is_easily_read_wrongly_gets_its_verdict(case):
    """Ends that sound well, progress without words, retries, launchers, schedulers, buffers.

    See `logs.yaml`.
    """
    verdict = of_log(filled(case["log"]), case.get("status"))
    assert case.get("title", "") in verdict.title
    assert case.get("fix", "") in verdict.fix
    if verdict.cause in FALLBACKS:
        assert verdict.fix in FIXES_OF_KINDS, "a class of failures alone suggests no fix"
    assert verdict.evidence[0].text == case["root"] if "root" in case else True
    assert case.get("certainty", verdict.certainty) == verdict.certainty
    if "next" in case:
        assert verdict.runner_up is not None
        assert verdict.runner_up[0] == case["next"]
    if "cause" in case:
        assert verdict.cause == case["cause"]
    elif "family" in case:
        assert verdict.family in (
            ("ended well", "unknown") if case["family"] == "healthy" else (case["family"],)
        )
    else:
        assert verdict.family != case["not_family"]


def test_evidence_of_a_hang_pairs_each_process_with_its_own_rank():
    """The rank that was noticed is often another than the one that is blamed."""
    hang = {
        "pid": 10, "rank": 0, "step": 5, "phase": "forward/backward", "seconds": 31, "limit": 30,
        "blamed_pid": 11, "blamed_rank": 1, "frame": "d.py:3 in get", "signature": "H1402",
        "sentence": "It waits for a lock.", "remedy": "restart",
        "ranks": [
            {"pid": 11, "rank": 1, "step": 4, "phase": "data wait", "frame": "d.py:3 in get"},
            {"pid": 10, "rank": 0, "step": 5, "phase": "optimizer", "frame": "t.py:9 in main"},
        ],
    }  # fmt: skip
    evidence = Evidence(
        events=(Event(kind="hang", global_step=5, unix_seconds=50.0, data=hang),),
        endings=(Ending(status=-15, role="command", sent_by="supervisor"),),
    )

    exhibits = [exhibit for exhibit in judge(evidence).evidence if "watchdog" in exhibit.source]

    assert [(exhibit.source, exhibit.rank) for exhibit in exhibits] == [
        ("watchdog, process 11", 1),
        ("watchdog, process 11", 1),
        ("watchdog, process 10", 0),
    ]
    assert "rank 0 (process 10)" in exhibits[0].text
    assert ["step 4" in exhibit.text for exhibit in exhibits] == [False, True, False]


TEXTS_OF = {
    "oom": OOM,
    "shapes": SHAPES,
    "timeout": TIMEOUT,
    "worker": "DataLoader worker (pid 4713) is killed by signal: Killed. ",
}


def evidence_of(case):
    """Return the evidence of a case of `facts.yaml`."""
    statements = []
    for row in case.get("statements", ()):
        frames = row.pop("frames", [["/home/me/train.py", 3, "step"]] if "kind" not in row else [])
        built = tuple(
            Frame(file=file, line=line, function=function) for file, line, function in frames
        )
        exception = {"kind": "exception", "exception": "RuntimeError"} if "kind" not in row else {}
        text = TEXTS_OF.get(row["text"], row["text"])
        statements.append(
            Statement(**{**exception, "source": "a.log:1", "frames": built, **row, "text": text})
        )
    events = tuple(
        Event(kind=each["kind"], global_step=5, unix_seconds=each.get("at", 1.0), data=each["data"])
        for each in case.get("events", ())
    )
    endings = tuple(Ending(**each) for each in case["endings"])
    return Evidence(
        statements=tuple(statements), endings=endings, events=events, **case.get("more", {})
    )


@pytest.mark.parametrize(
    "case",
    yaml.safe_load(Path(__file__).with_name("facts.yaml").read_text(encoding="utf-8")),
    ids=lambda case: case["shows"],
)
def test_facts_get_their_verdict(case):
    """Roots before cascades, counters of the kernel, hangs, leaks, ranks: see `facts.yaml`."""
    verdict = judge(evidence_of(case))
    assert {name: getattr(verdict, name) for name in case["verdict"]} == case["verdict"]
    words = "\n".join(
        (
            verdict.title,
            verdict.summary,
            *(each.text for each in verdict.evidence),
            *verdict.missing,
        )
    )
    for part in case.get("says", ()):
        assert part in words
    for part in case.get("not", ()):
        assert part not in words
    assert verdict.fix.startswith(case.get("fix", ""))


def test_a_plain_failure_is_named_with_its_place():
    """The verdict quotes the exception, names the user's own line and says what to change."""
    verdict = of_log(f"{TRACE}RuntimeError: {SHAPES}\n", status=1)
    assert (verdict.cause, verdict.family) == ("H965", "shape or type")
    assert verdict.where == "/home/me/train.py:9 in step"
    assert SHAPES in verdict.evidence[0].text
    assert verdict.evidence[0].source == "a.log:4"
    assert verdict.certainty == "likely"
    assert verdict.fix


@pytest.mark.parametrize(
    ("frames", "exception", "family", "words"),
    [
        (
            USER,
            "RuntimeError",
            "user code",
            ": no such head, at /home/me/train.py:9 in step: `model(x)`",
        ),
        (
            USER
            + '  File "/x/lib/python3.11/site-packages/torch/nn/functional.py", line 3, in linear\n'
            "    x\n",
            "RuntimeError",
            "shape or type",
            ": no such head, at /home/me/train.py:9 in step: `model(x)` (raised in torch/nn/",
        ),
        (
            USER,
            "ValueError",
            "user code",
            ": no such head, at /home/me/train.py:9 in step: `model(x)`",
        ),
        ("", "RuntimeError", "unknown", ": no such head. "),
        ("", "ValueError", "user code", ": no such head."),
    ],
)
def test_an_exception_that_no_signature_knows_is_its_own_verdict(frames, exception, family, words):
    """Type and message, the user's innermost line, the raising library.

    A class where it, or the type, shows.
    """
    head = "Traceback (most recent call last):\n" if frames else ""
    verdict = of_log(f"{head}{frames}{exception}: no such head\n", status=1)
    assert verdict.certainty is None, "it was seen, so it needs no word"
    assert (verdict.cause, verdict.family, verdict.restart) == ("H1608", family, "stop")
    assert verdict.exit_code == 10 + FAMILIES.index(family)
    assert verdict.title == f"{exception}: no such head"
    assert f"{exception}{words}" in verdict.summary


def test_unknown_says_what_is_missing_and_the_best_guess():
    """Nothing is claimed from a log without an end, but what was caught is the runner-up."""
    verdict = of_log(f"{TRACE}RuntimeError: {SHAPES}\n{GOING_ON}")
    assert verdict.cause == "H1600"
    assert verdict.missing
    assert verdict.runner_up is not None
    assert verdict.runner_up[0] == "H965"


def test_our_own_errors_keep_their_rule_and_their_fix():
    """An error of holdfast gets its own rule; an id that does not exist is not believed."""
    text = (
        "loss is NaN; after 2 rollbacks.\nFix: lower the learning rate.\n[H501] run `holdfast"
        " explain H501`"
    )
    verdict = of_log(f"{TRACE}holdfast.core.errors.NonFiniteError: {text}\n", status=1)
    assert (verdict.cause, verdict.family, verdict.fix) == (
        "H501",
        "numerics",
        "lower the learning rate.",
    )
    assert (
        of_log(f"{TRACE}ValueError: x\n[H404] run `holdfast explain H404`\n", status=1).cause
        == "H1608"
    )


@pytest.mark.parametrize("rule", sorted(all_rules()))
def test_what_a_rule_says_to_do_is_said_whole_and_in_one_line(rule):
    """Of a stop with a rule, the fix is the paragraph of its page to the last word, however the
    page is wrapped.
    """
    stop = Statement(text="x", source="guard", fatal=True, rule=rule)
    verdict = judge(Evidence(statements=(stop,)))
    paragraph = next(
        each for each in all_rules()[rule].text.split("\n\n") if each.startswith("**Fix.**")
    )
    assert verdict.cause == rule
    assert f"**Fix.** {verdict.fix}".split() == paragraph.split()
    assert "\n" not in verdict.fix + verdict.summary
    assert verdict.summary.endswith(": x.")


TEXTS = st.sampled_from(
    [SHAPES, OOM, TIMEOUT, "Killed", "x", "", "loss nan", "[H501] run `holdfast explain"]
)
NAMES = st.sampled_from([None, "RuntimeError", "OutOfMemoryError", "KeyboardInterrupt"])
ANY_OF_ITS_TYPE = dict.fromkeys(
    ("kind", "position", "unix_seconds", "rank", "fatal", "led_to_another", "logged"), ...
)
STATEMENTS = st.builds(
    Statement, text=TEXTS, exception=NAMES, source=st.just("a.log:1"), **ANY_OF_ITS_TYPE
)
ROLES, SENDERS = (
    st.sampled_from(["trainer", "other", "command"]),
    st.sampled_from([None, "user", "supervisor"]),
)
STATUSES = st.none() | st.integers(-64, 255)
ENDINGS = st.builds(
    Ending, status=STATUSES, pid=..., rank=..., role=ROLES, oom_kills=..., sent_by=SENDERS
)
KINDS = st.sampled_from(["hang", "leak", "memory_trend", "stop_requested"])
KEYS = ["signature", "certainty", "minutes_left", "bytes_per_step", "what", "retained_at", "frame"]
DATA = st.dictionaries(st.sampled_from(KEYS), st.none() | st.text(max_size=5) | st.floats(0, 99))
EVENTS = st.builds(
    Event, kind=KINDS, global_step=st.just(1), unix_seconds=st.floats(0, 1e9), data=DATA
)


@example(
    statements=[
        Statement(text=TIMEOUT, source="a.log:1", led_to_another=True),
        Statement(text=SHAPES, source="a.log:1", fatal=True, logged=True),
    ],
    endings=[],
    events=[],
)
@settings(max_examples=150, deadline=None)
@given(
    st.lists(STATEMENTS, max_size=6), st.lists(ENDINGS, max_size=3), st.lists(EVENTS, max_size=3)
)
def test_any_facts_give_a_verdict(statements, endings, events):
    """Every mixture gives a known cause and a certainty.

    A cascade never wins beside a good root.
    """
    verdict = judge(
        Evidence(statements=tuple(statements), endings=tuple(endings), events=tuple(events))
    )
    assert verdict.certainty in (None, *CERTAINTIES)
    assert verdict.family in FAMILIES
    assert verdict.exit_code == 0 or 10 < verdict.exit_code < 10 + len(FAMILIES)
    assert verdict.runner_up is None or verdict.runner_up[0] != verdict.cause
    json.dumps(verdict.as_json())
    certain = [
        each
        for each in statements
        if each.fatal and not each.led_to_another and each.exception in (None, "RuntimeError")
    ]
    roots = [each for each in certain if each.text in (SHAPES, OOM)]
    known = all_signatures().get(verdict.cause)
    assert not (roots and known is not None and known.role == "cascade")


@pytest.mark.parametrize(
    ("kind", "error", "fix_names"),
    [
        ("save_failed", "OSError: [Errno 28] No space left on device", "df -h"),
        ("save_refused", "1 tensor(s) hold NaN or Inf: model.weight", "nonfinite_origin"),
    ],
)
def test_a_save_that_was_refused_for_nan_is_no_reason_to_make_room(kind, error, fix_names):
    """H1622 sends nobody to a full disk if the state itself could not be saved."""
    data = {"newest_checkpoint": 4, "failed_saves": 1, "error": error}
    save = Event(kind=kind, global_step=7, unix_seconds=1.0)
    closing = Event(kind="not_saved", global_step=7, unix_seconds=2.0, data=data)

    verdict = judge(
        Evidence(source="run", endings=(Ending(status=0, role="command"),), events=(save, closing))
    )

    assert verdict.cause == "H1622"
    assert fix_names in verdict.fix
