"""The verdict: which of all that was seen is the cause, how sure it is, and when nothing is claimed."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.events import Event
from holdfast.explain.collecting import collect_stream
from holdfast.explain.evidence import Ending, Facts, Frame, Statement
from holdfast.explain.judging import judge
from holdfast.explain.rules import all_rules
from holdfast.explain.signature import FAMILIES
from holdfast.explain.signatures import all_signatures
from holdfast.explain.verdict import Verdict

SHAPES = "mat1 and mat2 shapes cannot be multiplied (4x11 and 10x2)"
TIMEOUT = (
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, Timeout(ms)=600000) "
    "ran for 600029 milliseconds before timing out."
)
OOM = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.65 GiB"
USER = '  File "/home/me/train.py", line 9, in step\n    model(x)\n'
TRACE = f"Traceback (most recent call last):\n{USER}"
GOING_ON = "".join(f"step {step} loss 0.5\n" for step in range(20))


def of_log(text: str, status: int | None = None) -> Verdict:
    return judge(collect_stream(io.BytesIO(text.encode()), name="a.log", status=status))


def said(text: str, **more: object) -> Statement:
    return Statement(text=text, source="a.log:1", **more)  # type: ignore[arg-type]


def thrown(text: str, exception: str = "RuntimeError", **more: object) -> Statement:
    frames = (Frame(file="/home/me/train.py", line=3, function="step"),)
    return said(text, kind="exception", exception=exception, frames=frames, **more)


CASES = yaml.safe_load(Path(__file__).with_name("logs.yaml").read_text(encoding="utf-8"))


def filled(log: str) -> str:
    """Return the log of a case, with its parts and repeated lines put in."""
    while names := re.findall(r"\{(\w+)\}", log):
        for name in names:
            log = log.replace(f"{{{name}}}", CASES["parts"][name])

    def repeated(match: re.Match[str]) -> str:
        return "".join(f"{match[2].replace('#', str(number))}\n" for number in range(int(match[1])))

    return re.sub(r"\{(\d+) x ([^}]*)\}", repeated, log)


@pytest.mark.parametrize("case", CASES["cases"], ids=lambda case: f"{case['shows'][:50]}: {case['log'][:30]}")
def test_a_log_that_is_easily_read_wrongly_gets_its_verdict(case):
    """Ends that sound well, progress without words, retries, launchers, schedulers, buffers: see `logs.yaml`."""
    verdict = of_log(filled(case["log"]), case.get("status"))
    if "cause" in case:
        assert verdict.cause == case["cause"]
    elif "family" in case:
        assert verdict.family in (("ended well", "unknown") if case["family"] == "healthy" else (case["family"],))
    else:
        assert verdict.family != case["not_family"]


@pytest.mark.parametrize("wrap", ["`{}`", "**{}**", '"{}"', "18:46:44  {}"])
def test_quoted_lines_are_unwrapped(wrap):
    """A log that somebody quoted in a report, or with bare times, is read like the log itself."""
    verdict = of_log("\n".join(wrap.format(line) for line in f"{TRACE}RuntimeError: {SHAPES}".splitlines()))
    assert (verdict.cause, verdict.where) == ("H965", "/home/me/train.py:9 in step")


def test_a_plain_failure_is_named_with_its_place():
    """The verdict quotes the exception, names the user's own line and says what to change."""
    verdict = of_log(f"{TRACE}RuntimeError: {SHAPES}\n", status=1)
    assert (verdict.cause, verdict.family) == ("H965", "shape or type")
    assert verdict.where == "/home/me/train.py:9 in step"
    assert SHAPES in verdict.evidence[0].text
    assert verdict.evidence[0].source == "a.log:4"
    assert verdict.confidence >= 0.9
    assert verdict.fix


@pytest.mark.parametrize(
    ("frames", "family", "words"),
    [
        (USER, "user code", "ValueError: no such head, at /home/me/train.py:9 in step. "),
        (
            USER + '  File "/x/lib/python3.11/site-packages/torch/nn/functional.py", line 3, in linear\n    x\n',
            "unknown",
            "ValueError: no such head, at /home/me/train.py:9 in step (raised in torch/nn/functional.py). ",
        ),
        ("", "unknown", "ValueError: no such head. "),
    ],
)
def test_an_exception_that_no_signature_knows_is_its_own_verdict(frames, family, words):
    """Type and message, the user's innermost line, and the library that raised it; a class only where it shows."""
    head = "Traceback (most recent call last):\n" if frames else ""
    verdict = of_log(f"{head}{frames}ValueError: no such head\n", status=1)
    assert (verdict.cause, verdict.family, verdict.restart) == ("H1608", family, "stop")
    assert verdict.exit_code == 10 + FAMILIES.index(family)
    assert verdict.title == "ValueError: no such head"
    assert verdict.summary.startswith(f"It failed with {words}")


def test_an_unknown_exception_is_the_root_of_what_only_follows_from_it():
    """A launcher's table around an exception that no signature knows does not hide it; a known root does."""
    unknown = thrown("lesson 4 follows lesson 3", "CurriculumError", cause=True)
    launcher = thrown("train.py FAILED", "ChildFailedError")
    assert judge(Facts(statements=(unknown, launcher), endings=(Ending(status=1),))).cause == "H1608"
    full = thrown(OOM, "OutOfMemoryError")
    assert judge(Facts(statements=(unknown, full), endings=(Ending(status=1),))).cause == "H901"


def test_the_earliest_root_over_ranks_wins_and_a_cascade_never_does():
    """Rank 1 reports a timeout first in the text; rank 0 had run out of memory ten minutes before."""
    statements = (
        thrown(TIMEOUT, rank=1, unix_seconds=700.0, fatal=True),
        thrown(OOM, "OutOfMemoryError", rank=0, unix_seconds=100.0, fatal=True),
    )
    verdict = judge(Facts(statements=statements, endings=(Ending(status=1),)))
    assert (verdict.cause, verdict.rank) == ("H901", 0)
    assert any(exhibit.role == "cascade" and exhibit.rank == 1 for exhibit in verdict.evidence)


def test_of_two_roots_the_rank_that_the_launcher_saw_fail_first_is_chosen():
    """The table of torchrun decides between two ranks that both failed."""
    statements = (thrown(SHAPES, rank=0, position=1), thrown(OOM, "OutOfMemoryError", rank=1, position=2))
    endings = (Ending(status=1, pid=4, rank=1, role="trainer"), Ending(status=1))
    assert judge(Facts(statements=statements, endings=endings)).cause == "H901"
    assert judge(Facts(statements=statements, endings=endings[1:])).cause == "H965"


def test_a_cascade_alone_is_told_as_one():
    """Without a root the cascade is named, less surely, and the missing root is said."""
    verdict = judge(Facts(statements=(thrown(TIMEOUT, rank=1),), endings=(Ending(status=1),)))
    assert verdict.cause == "H921"
    assert verdict.confidence < 0.8
    assert any("follows from" in words for words in verdict.missing)


def test_the_kernels_counter_makes_a_kill_one_for_memory():
    """SIGKILL is an OOM kill where the counter rose, a kill from outside where it did not; so for a lost worker."""
    killed = Facts(endings=(Ending(status=-9, oom_kills=1),))
    assert judge(killed).cause == "H909"
    assert judge(Facts(endings=(Ending(status=-9, oom_kills=0),))).cause == "H1602"
    lost = (thrown("DataLoader worker (pid 4713) is killed by signal: Killed. "),)
    assert judge(Facts(statements=lost, endings=(Ending(status=1, oom_kills=1),))).cause == "H909"
    assert judge(Facts(statements=lost, endings=(Ending(status=1, oom_kills=0),))).cause == "H1602"
    assert judge(Facts(statements=lost, endings=(Ending(status=1),))).cause == "H930"


def test_a_counter_that_rose_does_not_hide_another_failure():
    """An OOM kill elsewhere in the control group is no cause of a wrong shape."""
    facts = Facts(statements=(thrown(SHAPES, fatal=True),), endings=(Ending(status=1, oom_kills=1),))
    assert judge(facts).cause == "H965"


def test_unknown_says_what_is_missing_and_the_best_guess():
    """Nothing is claimed from a log without an end, but what was caught is the runner-up."""
    verdict = of_log(f"{TRACE}RuntimeError: {SHAPES}\n{GOING_ON}")
    assert verdict.cause == "H1600"
    assert verdict.missing
    assert verdict.runner_up is not None
    assert verdict.runner_up[0] == "H965"


def test_a_hang_that_the_supervisor_ended_is_the_cause():
    """SIGTERM by the supervisor after a hang is told as the hang, with its frame; not if a root failed before it."""
    data = {
        "pid": 7, "phase": "data wait", "seconds": 31.0, "limit": 30.0, "kind": "lock", "frame": "d.py:3 in get",
        "signature": "H1402", "confidence": 0.9, "sentence": "Worker 8 waits for a lock.", "remedy": "restart",
    }  # fmt: skip
    hang = Event(kind="hang", global_step=5, unix_seconds=50.0, data=data)
    ended = Ending(status=-15, role="command", sent_by="supervisor")
    verdict = judge(Facts(events=(hang,), endings=(ended,)))
    assert (verdict.cause, verdict.where) == ("H1402", "d.py:3 in get")
    before = thrown(OOM, "OutOfMemoryError", unix_seconds=10.0, fatal=True)
    assert judge(Facts(statements=(before,), events=(hang,), endings=(ended,))).cause == "H901"
    went_on = Ending(status=0, role="command")
    assert judge(Facts(events=(hang,), endings=(went_on,))).cause == "H1601"


def test_a_hang_for_which_ranks_of_a_launcher_were_ended_is_the_cause():
    """SIGTERM to ranks, which the launcher would have started again, is told as the hang, not as one from outside."""
    data = {"signature": "H1402", "confidence": 0.9, "sentence": "Worker 8 waits for a lock.", "remedy": "restart"}
    hang = Event(kind="hang", global_step=5, unix_seconds=50.0, data=data)
    ended = Event(kind="ranks_ended", global_step=5, unix_seconds=51.0, data={"pids": [7, 8], "signal": 15})
    endings = (Ending(status=1, role="command"), Ending(status=-15, role="trainer", pid=7, rank=0))
    assert judge(Facts(events=(hang, ended), endings=endings)).cause == "H1402"
    assert judge(Facts(events=(hang,), endings=endings)).cause != "H1402"


def test_memory_that_was_running_out_explains_a_kill_without_a_counter():
    """A predicted end of memory and SIGKILL, where no counter can be read, is told as such."""
    trend = Event(
        kind="memory_trend",
        global_step=9,
        unix_seconds=1.0,
        data={"what": "host", "bytes_per_step": 2**20, "minutes_left": 4.0},
    )
    verdict = judge(Facts(events=(trend,), endings=(Ending(status=-9),)))
    assert verdict.cause == "H1609"
    assert any("1 MiB a step" in exhibit.text for exhibit in verdict.evidence)


def test_the_line_that_keeps_memory_is_what_to_look_at_first():
    """Where a leak was traced, its line stands first in the fix of an out of memory."""
    leak = Event(
        kind="leak", global_step=9, unix_seconds=1.0,
        data={"what": "Tensor", "held_by": "history[...]", "retained_at": "train.py:31"},
    )  # fmt: skip
    facts = Facts(statements=(thrown(OOM, "OutOfMemoryError"),), events=(leak,), endings=(Ending(status=1),))
    verdict = judge(facts)
    assert verdict.cause == "H901"
    assert verdict.fix.startswith("Look first at train.py:31")


def test_a_leak_that_names_its_signature_is_the_cause_where_memory_ran_out():
    """Out of memory with a traced leak is told as the leak; a wrong shape is not."""
    full = (thrown(OOM, "OutOfMemoryError"),)
    ended = (Ending(status=1),)

    def with_leak(signature: str, statements: tuple[Statement, ...]) -> Verdict:
        data = {"signature": signature, "retained_at": "t.py:3"}
        leak = Event(kind="leak", global_step=9, unix_seconds=1.0, data=data)
        return judge(Facts(statements=statements, events=(leak,), endings=ended))

    on_device = next(
        each.id for each in all_signatures().values() if each.id[:3] == "H15" and each.family == "out of memory"
    )
    assert with_leak(on_device, full).cause == on_device
    assert OOM in with_leak(on_device, full).evidence[0].text
    assert with_leak("H1501", full).cause == "H901"
    assert with_leak(on_device, (thrown(SHAPES),)).cause == "H965"


def test_our_own_errors_keep_their_rule_and_their_fix():
    """An error of holdfast is told by its own rule; an id that does not exist is not believed."""
    text = "loss is NaN; after 2 rollbacks.\nFix: lower the learning rate.\n[H501] run `holdfast explain H501`"
    verdict = of_log(f"{TRACE}holdfast.core.errors.NonFiniteError: {text}\n", status=1)
    assert (verdict.cause, verdict.family, verdict.fix) == ("H501", "numerics", "lower the learning rate.")
    assert of_log(f"{TRACE}ValueError: x\n[H404] run `holdfast explain H404`\n", status=1).cause == "H1608"


@pytest.mark.parametrize("rule", sorted(all_rules()))
def test_what_a_rule_says_to_do_is_told_whole_and_in_one_line(rule):
    """Of a stop with a rule, the fix is the paragraph of its page to the last word, however the page is wrapped."""
    stop = Statement(text="x", source="guard", fatal=True, rule=rule)
    verdict = judge(Facts(statements=(stop,)))
    paragraph = next(each for each in all_rules()[rule].text.split("\n\n") if each.startswith("**Fix.**"))
    assert verdict.cause == rule
    assert f"**Fix.** {verdict.fix}".split() == paragraph.split()
    assert "\n" not in verdict.fix + verdict.summary
    assert verdict.summary == "A Guard stopped it: x."


def test_ctrl_c_is_not_taken_for_what_it_causes():
    """KeyboardInterrupt wins over the errors that follow from it."""
    chain = (thrown("", "KeyboardInterrupt", cause=True), thrown("DataLoader worker (pid(s) 7) exited unexpectedly"))
    assert judge(Facts(statements=chain, endings=(Ending(status=1),))).cause == "H1604"


TEXTS = st.sampled_from([SHAPES, OOM, TIMEOUT, "Killed", "x", "", "loss nan", "[H501] run `holdfast explain"])
STATEMENTS = st.builds(
    Statement,
    text=TEXTS,
    kind=st.sampled_from(["exception", "line"]),
    exception=st.sampled_from([None, "RuntimeError", "OutOfMemoryError", "KeyboardInterrupt"]),
    source=st.just("a.log:1"),
    position=st.integers(0, 999),
    unix_seconds=st.none() | st.floats(0, 1e9),
    rank=st.none() | st.integers(0, 3),
    fatal=st.none() | st.booleans(),
    cause=st.booleans(),
    logged=st.booleans(),
)
ENDINGS = st.builds(
    Ending,
    status=st.none() | st.integers(-64, 255),
    pid=st.none() | st.integers(1, 9),
    rank=st.none() | st.integers(0, 3),
    role=st.sampled_from(["trainer", "other", "command"]),
    oom_kills=st.none() | st.integers(0, 2),
    sent_by=st.sampled_from([None, "user", "supervisor"]),
)
EVENTS = st.builds(
    Event,
    kind=st.sampled_from(["hang", "leak", "memory_trend", "stop_requested"]),
    global_step=st.integers(0, 9),
    unix_seconds=st.floats(0, 1e9),
    data=st.dictionaries(
        st.sampled_from(
            ["signature", "confidence", "minutes_left", "bytes_per_step", "what", "retained_at", "frame"]
        ),
        st.none() | st.text(max_size=5) | st.floats(0, 99),
    ),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(STATEMENTS, max_size=6), st.lists(ENDINGS, max_size=3), st.lists(EVENTS, max_size=3))
def test_any_facts_give_a_verdict(statements, endings, events):
    """Every mixture gives a known cause and a confidence between 0 and 1; a cascade never wins beside a good root."""
    verdict = judge(Facts(statements=tuple(statements), endings=tuple(endings), events=tuple(events)))
    assert 0 < verdict.confidence < 1
    assert verdict.family in FAMILIES
    assert verdict.exit_code == 0 or 10 < verdict.exit_code < 10 + len(FAMILIES)
    assert verdict.runner_up is None or verdict.runner_up[0] != verdict.cause
    json.dumps(verdict.as_json())
    certain = [
        each for each in statements if each.fatal and not each.cause and each.exception in (None, "RuntimeError")
    ]
    roots = [each for each in certain if each.text in (SHAPES, OOM)]
    known = all_signatures().get(verdict.cause)
    assert not (roots and known is not None and known.role == "cascade")
