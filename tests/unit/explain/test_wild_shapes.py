"""Shapes of logs that were told wrongly: ends that sound well, progress without words, retries, launchers, pipes."""

from __future__ import annotations

import gzip
import io
import os
import threading
from pathlib import Path

import pytest
from rich.console import Console

from holdfast.cli.explain import print_verdict
from holdfast.core.errors import RunDirectoryError
from holdfast.explain.collecting import collect_log, collect_stream
from holdfast.explain.judging import judge
from holdfast.explain.logs.progress import is_end
from holdfast.explain.verdict import Verdict

STEPS = "".join(f"step {step} loss 0.5\n" for step in range(50))
MAIN = 'Traceback (most recent call last):\n  File "train.py", line 30, in <module>\n    main()\n'
OOM = f"{MAIN}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
SHAPES = f"{MAIN}RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x100 and 128x10)\n"
IMAGE = (
    'Traceback (most recent call last):\n  File "data.py", line 80, in load\n    img = Image.open(p)\n'
    "PIL.UnidentifiedImageError: cannot identify image file 'a.jpg'\n"
)
LAUNCHER = "[ERROR] [launch.py:434:sigkill_handler] ['python', 'main.py'] exits with return code = "


def of_log(text: str, status: int | None = None) -> Verdict:
    return judge(collect_stream(io.BytesIO(text.encode()), name="a.log", status=status))


@pytest.mark.parametrize(
    "line",
    [
        "Run finished: FAILED",
        "Training finished with error code 137",
        "Training not completed: 5 of 10 epochs",
        "Job completed with exit code 1",
        "Warmup training done",
        "training finished unsuccessfully",
    ],
)
def test_an_end_that_is_none_is_not_taken_for_one(line: str) -> None:
    """A line that says that something failed, or that only a part is done, does not make a run end well."""
    assert not is_end(line)
    assert of_log(f"{STEPS}{line}\n").family != "ended well"


@pytest.mark.parametrize("line", ["Training finished with exit code 0", "Training complete.", "Fit finished in 3 s"])
def test_a_good_end_stays_one(line: str) -> None:
    """What says that all went well is still read so."""
    assert of_log(f"{STEPS}{line}\n").family == "ended well"


def test_a_kill_after_the_end_is_told() -> None:
    """A process that was killed did not end well, although its log says that the training is done."""
    assert of_log(f"{STEPS}All epochs done\nKilled\n").cause == "H1602"


@pytest.mark.parametrize(
    "line",
    ["{}  0.234  0.456", "[{}/2000] 0.3", "第{}轮 损失 0.3", "Train [{}/459]\tError: 72.0", "it {} | 0.12 | 1e-3"],
)
def test_progress_needs_no_words(line: str) -> None:
    """A form of line that goes on with other numbers shows that an exception was caught; without it, it was not."""
    before = "".join(f"{line.format(step)}\n" for step in range(50))
    after = "".join(f"{line.format(step)}\n" for step in range(50, 300))
    assert of_log(before + IMAGE + after).cause == "H1600"
    assert of_log(before + IMAGE).cause == "H1231"


def test_repeated_tracebacks_are_no_progress() -> None:
    """The numbers in the code and the frames of tracebacks that come again and again show no progress."""
    frames = MAIN.replace("main()", "main(8, 3)")
    assert of_log(f"{frames}RuntimeError: CUDA error: device-side assert triggered\n" * 8).cause == "H911"


def test_a_logged_exception_needs_one_line_of_progress() -> None:
    """Where a logger printed an exception, one step after it shows that the run went on."""
    assert of_log(f"{STEPS}ERROR could not read sample 17\n{IMAGE}step 50 loss 0.4\n").cause == "H1600"


def test_an_ordinary_line_of_a_logger_does_not_make_a_traceback_logged() -> None:
    """A traceback right after a line at level INFO is as fatal as any, and beats an older one that was caught."""
    rows = "".join(f"row {row} | 0.2\n" for row in range(200))
    assert of_log(f"{IMAGE}{rows}2026-01-01 00:01:00 INFO saved\n{OOM}").cause == "H901"


def test_the_assertion_of_a_kernel_explains_what_follows() -> None:
    """The line of the kernel says more than the exception after it, and the verdict is as sure as with that alone."""
    line = "../NLLLoss.cu:103: nll: block: [5,0,0], thread: [9,0,0] Assertion `t >= 0 && t < n_classes` failed.\n"
    verdict = of_log(f"{STEPS}{line * 3}{MAIN}torch.AcceleratorError: CUDA error: device-side assert triggered\n")
    assert verdict.cause == "H912"
    assert verdict.confidence >= 0.85


@pytest.mark.parametrize(
    "line",
    [
        "TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.",
        "=>> PBS: job killed: vmem 5242880kb exceeded limit 4194304kb",
        "=>> PBS: job killed: mem 5242880kb exceeded limit 4194304kb",
        "slurmstepd: error: Job 12 exceeded memory limit (9000 > 8192), being killed",
    ],
)
def test_memory_limits_of_schedulers_are_about_memory(line: str) -> None:
    """A kill by a scheduler for memory is no preemption, which a restart with the same memory would answer."""
    assert of_log(f"{STEPS}{line}\n").cause == "H910"


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (f"{LAUNCHER}-9", "H1602"),
        (f"{LAUNCHER}-11", "H991"),
        ("ERROR: failed (exitcode: -7) local_rank: 0 (pid: 7) of binary: python", "H1606"),
        ("CalledProcessError: Command 'train.py' died with <Signals.SIGSEGV: 11>.", "H991"),
        ("srun: error: n1: task 0: Exited with exit code 137", "H1602"),
        ("worker 3 terminated with signal SIGTERM", "H1603"),
    ],
)
def test_signals_that_launchers_tell_are_read(line: str, cause: str) -> None:
    """The signal by which a rank ended stands in a line of its launcher."""
    assert of_log(f"{STEPS}{line}\n").cause == cause
    assert of_log(f"{line}\n{STEPS * 10}").cause != cause  # it went on: the launcher started it again


def test_ordinary_exit_codes_of_tools_are_no_signal() -> None:
    """A helper that exited with code 1 says nothing about the training."""
    assert of_log(f"{STEPS}uploader exited with exit code 1\nTraining complete.\n").family == "ended well"


def test_steps_of_other_ranks_do_not_hide_the_failure() -> None:
    """The rank that failed is named although others printed a few steps before the launcher ended them."""
    child = f"{MAIN}torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \ntrain.py FAILED\n"
    verdict = of_log(f"{STEPS}{OOM}{STEPS[:60]}{child}")
    assert verdict.cause == "H901"
    assert verdict.confidence < 0.75


def test_output_that_waited_in_a_buffer_does_not_hide_the_failure() -> None:
    """All output after the traceback is what a buffer held, unless it says that the training is done."""
    assert of_log(SHAPES + STEPS).cause == "H965"
    assert of_log(f"{STEPS}{OOM}Best epoch: 3\nBest step: 400\n").cause == "H901"
    assert of_log(f"{SHAPES}{STEPS}Training complete.\n").family == "ended well"


def test_a_line_of_the_scheduler_outlasts_what_ranks_flush() -> None:
    """Ranks print what they had buffered after the scheduler ended them; a job that is requeued goes on for long."""
    line = "slurmstepd: error: *** STEP 12.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***\n"
    assert of_log(STEPS + line + STEPS).cause == "H990"
    assert of_log(f"{STEPS}{line}{STEPS}Training complete.\n").family == "ended well"
    assert of_log(STEPS + line + STEPS * 10).cause == "H1600"


@pytest.mark.parametrize("between", ["retrying (attempt 2)\n", "restarting from step 10\n", "step 0 loss 1.0\n"])
def test_after_a_retry_the_later_failure_counts(between: str) -> None:
    """Of two tracebacks close together the later ended the run, where something says that it began again between."""
    assert of_log(OOM + between + SHAPES).cause == "H965"
    assert of_log(OOM + SHAPES).cause == "H901"


@pytest.mark.parametrize("wrap", ["`{}`", "**{}**", '"{}"', "18:46:44  {}"])
def test_quoted_lines_are_unwrapped(wrap: str) -> None:
    """A log that somebody quoted in a report, or with bare times, is read like the log itself."""
    text = "\n".join(wrap.format(line) for line in SHAPES.splitlines())
    assert of_log(text).cause == "H965"
    assert of_log(text).where == "train.py:30 in <module>"


def test_an_error_of_the_driver_in_the_middle_of_a_step_is_a_full_memory() -> None:
    """In backward the context exists, so that more memory is needed; before it, somebody else holds the device."""
    frame = '  File "torch/autograd/__init__.py", line 90, in backward\n    run()\n'
    assert of_log(f"{MAIN}{frame}RuntimeError: CUDA error: out of memory\n").cause == "H901"
    assert of_log(f"{MAIN}RuntimeError: CUDA error: out of memory\n").cause == "H1105"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("[rank0]:[E P.cpp:1025] [PG 0 Rank 0] Future for ProcessGroup abort timed out after 600000 ms", "H921"),
        (f"{MAIN}RuntimeError: write(): fd 29 failed with Input/output error", "H980"),
        (f"{MAIN}RuntimeError: Your LightningModule has parameters that were not used in producing the loss", "H925"),
        (f"{MAIN}ValueError: Network outputs is NAN! Stop", "H963"),
        ("W0409 07:28:49.530000 1359 torch/api.py:719] Received 15 death signal, shutting down workers", "H1147"),
        ("[2026-01-15 18:36:49,345 E 1 2] logging.cc:317: *** SIGTERM received at time=1642268209 ***", "H1603"),
        ("[rank: 0] Received SIGTERM: 15", "H1603"),
        ("Segmentation fault      (core dumped)", "H991"),
        ("Gradient overflow, reducing loss scale to 3.5e-307\nZeroDivisionError: float division by zero", "H1280"),
    ],
)  # fmt: skip
def test_wordings_that_were_missed(text: str, cause: str) -> None:
    """Other wordings of known failures are known."""
    assert of_log(f"{STEPS}{text}\n").cause == cause


def test_nothing_is_called_almost_certain_where_nothing_is_known() -> None:
    """How sure it is that nothing is known is not printed as how sure the verdict is."""
    out = Console(file=io.StringIO(), width=200)
    print_verdict(out, of_log("hello\n"), "a.log")
    assert "certain" not in out.file.getvalue()  # type: ignore[attr-defined]


def test_a_log_that_ends_inside_a_traceback_says_so() -> None:
    """The last frame of a traceback without its exception is named among what is missing."""
    verdict = of_log(f'{STEPS}{MAIN}  File "train.py", line 44, in step\n    loss.ba')
    assert any('File "train.py", line 44, in step' in each for each in verdict.missing)


def test_compressed_logs_are_read_or_refused(tmp_path: Path) -> None:
    """A log packed by gzip is read, also if it is cut off; other packed files are refused with what to do."""
    log = tmp_path / "log.gz"
    log.write_bytes(gzip.compress((STEPS + SHAPES).encode()))
    assert judge(collect_log(log)).cause == "H965"
    log.write_bytes(log.read_bytes()[:-6])
    assert judge(collect_log(log)).cause == "H965"
    log.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(20))
    with pytest.raises(RunDirectoryError, match=r"(?s)zstd.*zcat"):
        collect_log(log)


def test_what_never_ends_is_refused() -> None:
    """A device ends with an error instead of never."""
    with pytest.raises(RunDirectoryError, match="device"):
        collect_log(Path("/dev/zero"))


def test_a_pipe_of_a_shell_is_read() -> None:
    """A pipe with a writer is read to its end, as `holdfast explain <(command)` opens it."""
    reading, writing = os.pipe()
    writer = threading.Thread(target=lambda: (os.write(writing, SHAPES.encode()), os.close(writing)))
    writer.start()
    try:
        assert judge(collect_log(Path(f"/dev/fd/{reading}"))).cause == "H965"
    finally:
        writer.join()
        os.close(reading)
