"""What is known about each way in which a process stands still. Chosen by the event ``hang``, so without patterns."""

from __future__ import annotations

from holdfast.explain.hangs.standing_still import HangKind
from holdfast.explain.signature import Restart, Signature

_SEEN = "reproduced on torch 2.13 (benchmarks/hang_detection.py)"


def _hang(
    number: int,
    title: str,
    *,
    means: str,
    fix: str,
    example: str,
    false_positives: str = "",
    restart: Restart = "retry",
    seen: str = _SEEN,
) -> Signature:
    return Signature(
        id=f"H{number}",
        title=title,
        family="hang",
        patterns=(),
        restart=restart,
        means=means,
        fix=fix,
        false_positives=false_positives,
        example=example,
        seen=seen,
    )


BY_KIND: dict[HangKind, Signature] = {
    "loader": _hang(
        1401,
        "the loop waits for a batch that no worker makes",
        means="Each worker of the loader is idle, or gone, and the batch that the loop waits for never comes. A "
        "result was lost on its way: it could not be pickled (its traceback stands in the output only), or a worker "
        "was killed while it held a lock of the queue.",
        fix="Look in the output for a traceback of `_ForkingPickler.dumps`. `holdfast.DataLoader` turns such a "
        "result into an error, and replaces its workers. With torch's own loader set `timeout=`.",
        example="Process 4711 has made no progress for 31 s in the phase 'data wait', at step 12. It waits for a "
        "batch, and no worker makes one, at train.py:40 in main.",
        seen="reproduced on torch 2.13; pytorch#142884",
    ),
    "lock": _hang(
        1402,
        "a thread waits for a lock that nobody lets go",
        means="Two threads wait for each other, or a lock was held by another thread at the moment of a fork: in "
        "the child it stays locked for ever, since the thread that would open it does not exist there.",
        fix="Take locks always in the same order. Start threads after the workers, or use the start method "
        "`forkserver` or `spawn` for them.",
        example="Loader worker 4713 waits for a lock at data.py:18 in __getitem__.",
        seen="reproduced on torch 2.13; pytorch#75147",
    ),
    "collective": _hang(
        1403,
        "ranks wait in a collective that not all take part in",
        means="A collective ends only when every rank has called it. One has ended, has made fewer steps (ranks "
        "with different numbers of batches), went another way (a branch on its rank or on its loss), or calls "
        "another collective.",
        fix="Look at the rank that is the odd one out, and at where the others stand. Give each rank the same "
        "number of batches (`drop_last=True`, `Join`), and call collectives on all ranks or on none.",
        example="Rank 0 (process 4711) has made no progress for 31 s in the phase 'forward/backward', at step 100. "
        "Rank 1 has ended, and the others wait for it.",
        false_positives="A rank that evaluates or saves alone while the others wait: raise the limit of that phase.",
    ),
    "I/O": _hang(
        1404,
        "a process waits for a file",
        means="The file system does not answer: a network mount whose server is gone, a named pipe that nobody "
        "opens at its other end, or a lock on a file that another process holds.",
        fix="Look whether the mount answers (`df`, `ls`), and who holds the lock (`fuser`, /proc/locks). Copy data "
        "to a local disk before training.",
        example="It waits for a lock on a file at cache.py:77 in open_cache.",
    ),
    "GPU sync": _hang(
        1405,
        "the loop waits for the GPU",
        means="A kernel does not end, or one that waits for other ranks does not. The line is where the loop needed "
        "a result (`.item()`, `.cpu()`, `synchronize`), not where the work was given to the GPU.",
        fix="Look in the kernel log for Xid errors. Run once with `CUDA_LAUNCH_BLOCKING=1` to find the operation. "
        "If the GPU does not answer to `nvidia-smi`, the machine needs a reset.",
        example="It waits for the GPU at train.py:66 in step.",
        false_positives="A very long kernel.",
        seen="not reproduced here: no GPU that hangs",
    ),
    "native code": _hang(
        1406,
        "a call into native code does not come back",
        means="A function in C uses a processor or sleeps, and its line has not moved. If it holds the "
        "interpreter's lock, no other thread and no signal handler of Python runs either. A regular expression that "
        "goes back over and over (`(a+)+$`) is the most frequent case.",
        fix="Look at the line and at what it was given. Bound the length of what a pattern is applied to, and write "
        "it without nested repetition.",
        example="It is in native code (sre_ucs1_match), using a processor, at text.py:31 in clean.",
        false_positives="One long call, such as the SVD of a large matrix.",
    ),
    "Python loop": _hang(
        1407,
        "a loop in Python does not end",
        means="The process computes and its lines move, but nothing of the training does: a condition that never "
        "comes true, or work of a size that nobody expected.",
        fix="Look at the condition of the loop at that line, and at the sample or batch that it was given. If it is "
        "meant to take so long, raise the limit of the phase with `--hang-limit`.",
        example="It is in a loop at data.py:52 in crop.",
        false_positives="Long work in Python, such as computing a metric. Such a process is left alone for as long "
        "as `moving` allows.",
    ),
    "stopped": _hang(
        1408,
        "a process was stopped",
        means="Somebody sent SIGSTOP or SIGTSTP to a worker or to one rank, or a debugger holds it. The others wait.",
        fix="`kill -CONT PID` lets it go on. The supervisor does so once by itself.",
        example="Loader worker 4713 was stopped by a signal at data.py:12 in __getitem__.",
    ),
    "pipe": _hang(
        1409,
        "a process waits for a pipe",
        means="It writes to a pipe that is full because nobody reads it (64 KiB on Linux), or reads from one that "
        "nobody writes to. Often it is the output of a subprocess that was opened with `PIPE` and not read.",
        fix="Read what the subprocess says (`communicate`), or send it to a file or `DEVNULL`.",
        example="It waits for a pipe to be read by somebody: it is full, at log.py:9 in emit.",
    ),
    "socket": _hang(
        1410,
        "a process waits for the other end of a connection",
        means="A server does not answer, and the call has no time limit: a store of data, a tracking server, a "
        "download.",
        fix="Set a time limit (`socket.setdefaulttimeout`, `timeout=` of the client) and let the client retry. Do "
        "not read training data over a connection without one.",
        example="It waits for the other end of a connection at fetch.py:20 in read_shard.",
        false_positives="A server that is slow once.",
    ),
    "process": _hang(
        1411,
        "a process waits for another process to end",
        means="`subprocess.wait`, `Process.join` or the end of a pool waits for a process that does not end.",
        fix="Look at what that process does. Give the wait a `timeout`, and kill the process if it passes.",
        example="It waits for a process at tools.py:44 in convert.",
    ),
    "queue": _hang(
        1412,
        "a thread waits for a queue that nobody fills or empties",
        means="The other side has ended, or waits for this one, or failed without a word: an exception in a thread "
        "ends only the thread.",
        fix="Give `get` and `put` a `timeout`, hand exceptions over through the queue, and look at the other side.",
        example="It waits for a queue at prefetch.py:28 in __next__.",
    ),
    "sleep": _hang(
        1413,
        "a process sleeps",
        means="It sleeps, or polls for something that does not come: a file of another job, a port, a flag.",
        fix="Look at what the loop around the sleep waits for, and give it a limit.",
        example="It sleeps at wait.py:7 in wait_for_file.",
    ),
    "OpenMP": _hang(
        1414,
        "an operation waits for OpenMP threads that a fork did not copy",
        means="GNU OpenMP does not survive a fork: threads that the parent had started are missing in the child, "
        "and a parallel operation waits for them. torch gives workers one thread for that reason; something set "
        "more.",
        fix="Do not call `torch.set_num_threads` in a worker, or start workers by `forkserver` or `spawn`, or set "
        "`OMP_NUM_THREADS=1` for the whole run.",
        example="Loader worker 4713 waits for threads of OpenMP at data.py:30 in __getitem__.",
        seen="reproduced on torch 2.13; pytorch#45198",
    ),
    "merely slow": _hang(
        1415,
        "a process is slower than it was, and still works",
        means="It passed its limit, but it uses a processor or moves bytes, and what it does changes.",
        fix="Wait. If it is meant to take so long, raise the limit of the phase with `--hang-limit`.",
        example="It works, mostly waiting, at data.py:12 in __getitem__.",
    ),
    "unknown": _hang(
        1416,
        "a process stands still, and it is not known how",
        means="Neither its stack nor the kernel's view of it could be read, mostly for want of permission.",
        fix="Install py-spy (`pip install 'holdfast[stacks]'`), and allow ptrace: in a container "
        "`--cap-add=SYS_PTRACE`.",
        example="It stands still.",
    ),
}
"""By the kind that the watchdog finds."""

SIGNATURES: tuple[Signature, ...] = tuple(BY_KIND.values())
