"""Healthy trainings whose logs look bad.

They print words of errors, catch exceptions, warn, and end well.

Each function is run in a process of its own by ``python -m benchmarks.healthy_runs NAME`` and must
end with status 0; a verdict on its log must not be one of failure. Some end without a word that
they are done.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

HEALTHY: dict[str, Callable[[], None]] = {}


def healthy(body: Callable[[], None]) -> Callable[[], None]:
    HEALTHY[body.__name__] = body
    return body


def _train(steps: int, say: Callable[[str], object] = print, *, first: int = 0) -> None:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(first, first + steps):
        loss = model(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        say(f"step {step} loss {loss.item():.4f} lr 0.01")


@healthy
def plain_training() -> None:
    _train(20)
    print("Training complete.")


@healthy
def ends_without_a_word() -> None:
    _train(20)


@healthy
def progress_bar_on_standard_error() -> None:
    for number in range(50):
        bar = "#" * (number // 5)
        sys.stderr.write(
            f"\r{2 * number}%|{bar:<10}| {number}/50 [00:00<00:01, 99.0it/s, loss=0.{number}]"
        )
    _train(3)
    print("done")


@healthy
def logs_that_mention_death() -> None:
    import logging

    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s - %(name)s - %(levelname)s - %(message)s"
    )
    log = logging.getLogger("trainer")
    log.info("killed 3 zombie processes of an earlier run")
    log.info("if you see 'CUDA out of memory. Tried to allocate', lower --batch-size")
    _train(10, log.info)
    log.warning("Segmentation fault handler is installed")
    _train(10, log.info, first=10)
    log.info("training finished, 0 errors")


@healthy
def exception_caught_and_printed() -> None:
    import traceback

    import torch

    _train(5)
    try:
        torch.nn.Linear(10, 2)(torch.zeros(4, 11))
    except RuntimeError:
        traceback.print_exc()
        print("validation failed, going on without it")
    _train(5, first=5)


@healthy
def exception_logged_by_a_logger() -> None:
    import logging

    logging.basicConfig(level=logging.INFO)
    log = logging.getLogger("data")
    _train(5, log.info)
    for index in range(3):
        try:
            {}[index]
        except KeyError:
            log.exception("sample %d is broken, skipped", index)
    _train(5, log.info, first=5)
    log.info("saved the final model")


@healthy
def retries_a_download() -> None:
    import socket
    import traceback

    for attempt in range(2):
        try:
            socket.create_connection(("127.0.0.1", 9), timeout=1).close()
        except OSError:
            traceback.print_exc()
            print(f"attempt {attempt} failed, using the cached copy")
    _train(12)


@healthy
def optional_import_is_missing() -> None:
    try:
        import flash_attention_that_is_not_here  # noqa: F401
    except ImportError as error:
        print(f"WARNING: {type(error).__name__}: {error}; using the slow path")
    _train(12)


@healthy
def memory_error_survived_with_a_smaller_batch() -> None:
    import resource

    import torch

    size = 1 << 34
    resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, 2 << 30))
    while size > 1 << 20:
        try:
            torch.zeros(size, dtype=torch.uint8)
            break
        except RuntimeError as error:
            print(f"RuntimeError: {error}")
            size //= 8
            print(f"retrying with batch size {size}")
    _train(12)


@healthy
def warnings_of_torch() -> None:
    import warnings

    import torch

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scheduler.step()
    torch.nn.functional.mse_loss(torch.zeros(4, 1), torch.zeros(4))
    warnings.warn(
        "this checkpoint was written by an older version and may be invalid",
        UserWarning,
        stacklevel=1,
    )
    _train(10)
    print("Finished training: 0 failed batches")


@healthy
def nan_batch_is_skipped() -> None:
    _train(5)
    print("step 5 loss nan, batch skipped")
    _train(10, first=6)


@healthy
def evaluation_that_counts_errors() -> None:
    _train(10)
    print("word error rate: 0.12, errors: 31, insertions: 4, killed tokens: 0")
    print("epoch 1 done: train loss 0.51, val error 0.12, aborted: 0")
    print("training finished")


@healthy
def workers_of_a_loader() -> None:
    import torch

    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.randn(64, 4)), 8, num_workers=2
    )
    for epoch in range(2):
        for step, (batch,) in enumerate(loader):
            print(f"epoch {epoch} step {step} mean {batch.mean():.3f} loss 0.1")


@healthy
def fails_over_to_a_child() -> None:
    import subprocess

    for status in (3, 0):
        ended = subprocess.run(
            [sys.executable, "-c", f"import sys; print('exit', {status}); sys.exit({status})"]
        )
        print(f"preprocessing ended with exit code {ended.returncode}")
    _train(10)
    print("all done")


@healthy
def exception_in_a_thread_that_nobody_needs() -> None:
    import threading

    thread = threading.Thread(target=lambda: 1 / 0, name="telemetry")
    thread.start()
    thread.join()
    _train(12)


@healthy
def object_that_complains_when_deleted() -> None:
    class Handle:
        def __del__(self) -> None:
            raise ValueError("I/O operation on closed file")

    _train(5)
    Handle()
    _train(5, first=5)


@healthy
def json_lines_of_a_trainer() -> None:
    import json

    _train(10, lambda text: print(json.dumps({"loss": 0.1, "message": text, "errors": 0})))
    print(json.dumps({"train_runtime": 1.2, "train_loss": 0.1}).replace('"', "'"))


@healthy
def text_that_is_trained_on() -> None:
    samples = [
        "Traceback is a word of programmers",
        "the process was Killed by the king",
        "RuntimeError is what they said",
        "CUDA error: is what is written in the forum",
        "connection reset by peer, said the guest",
    ]
    for step, sample in enumerate(samples):
        print(f"step {step} loss 0.{step}5 sample: {sample!r}")
    _train(10, first=5)


if __name__ == "__main__":
    HEALTHY[sys.argv[1]]()
