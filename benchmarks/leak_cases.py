"""Leaks that are really planted into a small training.

Ways in which memory is kept from step to step.

Each case becomes a script of its own. The line that keeps the memory is marked with ``# here``; it
is what a trace must name. Every script also keeps one number a step, as most scripts do, which is
not to be named.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent, indent

MARK = "# here"
_TEMPLATE = """\
import time

import torch
from torch import nn

{setup}

def train(steps):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    curve = []
{before}
    for step in range(steps):
        inputs, targets = torch.randn(32, 64), torch.randn(32, 8)
{load}
        outputs = model(inputs)
        loss = nn.functional.mse_loss(outputs, targets)
{forward}
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        curve.append(loss.item())
{after}
        time.sleep(0.002)


if __name__ == "__main__":
    train(100_000)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to leak."""

    kind: str = "container"
    setup: str = ""
    before: str = ""
    load: str = ""
    forward: str = ""
    after: str = ""

    def script(self) -> str:
        """Return the whole script."""
        return _TEMPLATE.format(
            setup=dedent(self.setup).strip("\n") + "\n",
            before=_block(self.before, 4),
            load=_block(self.load, 8),
            forward=_block(self.forward, 8),
            after=_block(self.after, 8),
        )


def _block(text: str, width: int) -> str:
    return indent(dedent(text).strip("\n"), " " * width)


def write(case: str, folder: Path) -> tuple[Path, list[int]]:
    """Write the script of a case, and return it with the numbers of the lines that may be named."""
    path = folder / "train.py"
    path.write_text({**CASES, **HELD_OUT}[case].script())
    return path, [
        number for number, line in enumerate(path.read_text().splitlines(), 1) if MARK in line
    ]


CASES: dict[str, Case] = {
    "list, local": Case(before="history = []", after="history.append(outputs.detach())  # here"),
    "list, +=": Case(before="seen = []", after="seen += [inputs, targets]  # here"),
    "list, of another function": Case(
        setup="""
        def remember(store, value):
            kept = value.clone()
            store.append(kept)  # here
        """,
        before="history = []",
        after="remember(history, outputs.detach())",
    ),
    "list of losses with their graphs": Case(
        kind="graph",
        before="losses = []",
        forward="losses.append(loss)  # here",
        after="mean = sum(curve) / len(curve)",
    ),
    "dict of lists": Case(
        setup="from collections import defaultdict\nrecords = defaultdict(list)",
        after=(
            "records['loss'].append(loss.item())\nrecords['outputs'].append(outputs.detach())  #"
            " here"
        ),
    ),
    "dict, setdefault": Case(
        setup="by_step = {}", after="by_step.setdefault(step // 100, []).append(inputs)  # here"
    ),
    "deque": Case(
        setup="from collections import deque\nreplay = deque()",
        after="replay.append((inputs, targets))  # here",
    ),
    "queue": Case(
        setup="import queue\ndone = queue.Queue()", after="done.put(outputs.detach())  # here"
    ),
    "heap": Case(
        setup="import heapq\nhardest = []",
        after="heapq.heappush(hardest, (-curve[-1], step, inputs))  # here",
    ),
    "closure": Case(
        setup="""
        def make_recorder():
            kept = []

            def record(value):
                kept.append(value)  # here

            return record
        """,
        before="record = make_recorder()",
        after="record(outputs.detach())",
    ),
    "chain of closures": Case(
        kind="linked",
        setup="""
        def with_metric(previous, value):
            def metrics():
                return (*previous(), value.mean())

            return metrics
        """,
        before="report = tuple",
        after="report = with_metric(report, outputs.detach())  # here",
    ),
    "autograd chain, local": Case(
        kind="autograd chain", before="total = 0.0", forward="total = total + loss  # here"
    ),
    "autograd chain, attribute": Case(
        kind="autograd chain",
        setup="""
        class Meter:
            def __init__(self):
                self.total = torch.zeros(())

            def update(self, value):
                self.total = self.total + value  # here
        """,
        before="meter = Meter()",
        forward="meter.update(loss)",
    ),
    "autograd chain, recurrent state": Case(
        kind="autograd chain",
        before="cell, hidden = nn.GRUCell(8, 8), torch.zeros(32, 8)",
        forward="hidden = cell(outputs.detach(), hidden)  # here",
    ),
    "exceptions in a list": Case(
        kind="exception",
        setup="""
        failures = []

        def check(outputs):
            copy = outputs.detach().clone()
            if copy.numel():
                raise ValueError("out of range")
        """,
        after="""
        try:
            check(outputs)
        except ValueError as error:
            failures.append(error)  # here
        """,
    ),
    "chain of exceptions": Case(
        kind="exception",
        setup="""
        class Trouble(Exception):
            pass

        def check(outputs, before):
            copy = outputs.detach().clone()
            raise Trouble(str(copy.shape)) from before
        """,
        before="last = None",
        after="""
        try:
            check(outputs, last)
        except Trouble as error:
            last = error  # here
        """,
    ),
    "reference cycle": Case(
        kind="cycle",
        setup="""
        import gc

        gc.disable()

        class Node:
            def __init__(self, value):
                self.value = value
                self.itself = self  # here
        """,
        after="Node(outputs.detach())",
    ),
    "parent and child": Case(
        kind="cycle",
        setup="""
        import gc

        gc.disable()

        class Batch:
            def __init__(self, values):
                self.values = values
                self.views = [View(self)]  # here: either closes the circle

        class View:
            def __init__(self, batch):
                self.batch = batch  # here
        """,
        load="batch = Batch(inputs)",
    ),
    "forward hooks": Case(
        kind="hooks",
        load="""
        features = []
        model[0].register_forward_hook(lambda module, args, found, into=features: into.append(found.detach()))  # here
        """,
    ),
    "hooks of a parameter": Case(
        kind="hooks",
        load="model[2].weight.register_hook(lambda grad, scale=inputs.std(): grad * scale)  # here",
    ),
    "hooks of an optimizer": Case(
        kind="hooks",
        load="optimizer.register_step_post_hook(lambda *_, batch=inputs: None)  # here",
    ),
    "arrays in a list": Case(
        before="predictions = []",
        after="predictions.append(outputs.detach().numpy().copy())  # here",
    ),
    "array that is appended to": Case(
        kind="value",
        before="import numpy as np\neverything = np.zeros((0, 8))",
        after="everything = np.concatenate([everything, outputs.detach().numpy()])  # here",
    ),
    "tensor that is appended to": Case(
        kind="value",
        setup="""
        class Recorder:
            def __init__(self):
                self.scores = torch.zeros(0, 8)

            def add(self, scores):
                self.scores = torch.cat([self.scores, scores])  # here
        """,
        before="recorder = Recorder()",
        after="recorder.add(outputs.detach())",
    ),
    "text": Case(
        kind="value", before="log = ''", after="log += f'{step}: {outputs.tolist()}\\n'  # here"
    ),
    "cache of a data set": Case(
        setup="""
        class Images(torch.utils.data.Dataset):
            def __init__(self):
                self.cache = {}

            def __len__(self):
                return 1_000_000

            def __getitem__(self, index):
                if index not in self.cache:
                    self.cache[index] = torch.randn(3, 32, 32)  # here
                return self.cache[index]
        """,
        before="batches = iter(torch.utils.data.DataLoader(Images(), batch_size=4))",
        load="images = next(batches)",
    ),
    "attribute of a class": Case(
        setup="""
        class Head(nn.Module):
            recent = []

            def forward(self, values):
                self.recent.append(values.detach())  # here
                return values.mean()
        """,
        before="head = Head()",
        forward="head(outputs)",
    ),
    "lru_cache": Case(
        kind="cache",
        setup="""
        import functools

        @functools.lru_cache(maxsize=None)  # here
        def encode(values):
            return values.sin()
        """,
        load="encoded = encode(inputs)",
    ),
    "default argument": Case(
        setup="""
        def smooth(value, recent=[]):
            recent.append(value)  # here
            return torch.stack(recent[-10:]).mean(0)
        """,
        after="mean = smooth(outputs.detach())",
    ),
    "handler of a logger": Case(
        setup="""
        import logging

        class Memory(logging.Handler):
            def __init__(self):
                super().__init__()
                self.records = []

            def emit(self, record):
                self.records.append(record)  # here

        logger = logging.getLogger("train")
        logger.setLevel(logging.INFO)
        logger.addHandler(Memory())
        """,
        after="logger.info('outputs %s', outputs.detach())",
    ),
    "generators": Case(
        setup="""
        def pieces(values):
            for piece in values.split(8):
                yield piece
        """,
        before="unfinished = []",
        after="parts = pieces(inputs)\nnext(parts)\nunfinished.append(parts)  # here",
    ),
    "linked list": Case(
        kind="linked",
        setup="""
        class Link:
            def __init__(self, value, before):
                self.value, self.before = value, before
        """,
        before="newest = None",
        after="newest = Link(outputs.detach(), newest)  # here",
    ),
    "list in an object of a module": Case(
        setup="""
        class Memory(nn.Module):
            def __init__(self):
                super().__init__()
                self.bank = []

            def forward(self, values):
                self.bank.append(values)  # here
                return values.mean()

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.memory = Memory()

        wrapped = Model()
        """,
        forward="wrapped.memory(outputs.detach())",
    ),
    "every fourth step": Case(
        before="snapshots = []",
        after="""
        if step % 4 == 0:
            snapshots.append({name: value.clone() for name, value in model.state_dict().items()})  # here
        """,
    ),
}

HELD_OUT: dict[str, Case] = {
    "callback of a trainer": Case(
        setup="""
        class Keep:
            def __init__(self):
                self.by_step = {}

            def on_step(self, trainer):
                self.by_step[trainer.step] = trainer.outputs  # here

        class Trainer:
            def __init__(self, callbacks):
                self.step, self.callbacks, self.outputs = 0, callbacks, None

            def stepped(self, outputs):
                self.step, self.outputs = self.step + 1, outputs
                for callback in self.callbacks:
                    callback.on_step(self)
        """,
        before="trainer = Trainer([Keep()])",
        after="trainer.stepped(outputs.detach())",
    ),
    "list that is built anew, in slots": Case(
        kind="value",
        setup="""
        class Buffer:
            __slots__ = ("items",)

            def __init__(self):
                self.items = []

            def push(self, item):
                self.items = [*self.items, item]  # here
        """,
        before="buffer = Buffer()",
        after="buffer.push(outputs.detach())",
    ),
    "counter of texts": Case(
        setup="from collections import Counter\nseen = Counter()",
        after="for row in outputs.tolist():\n    seen[str(row)] += 1  # here",
    ),
    "variable of an outer function": Case(
        kind="autograd chain",
        setup="""
        def make_meter():
            total = torch.zeros(())

            def add(value):
                nonlocal total
                total = total + value  # here
                return total

            return add
        """,
        before="add = make_meter()",
        forward="add(loss)",
    ),
    "futures": Case(
        setup="from concurrent.futures import ThreadPoolExecutor",
        before="futures, executor = [], ThreadPoolExecutor(1)",
        after="futures.append(executor.submit(torch.clone, outputs.detach()))  # here",
    ),
    "buffers of a module": Case(
        after="model.register_buffer(f'step_{step}', outputs.detach())  # here"
    ),
    "attributes": Case(
        setup="class Store:\n    pass",
        before="store = Store()",
        after="setattr(store, f'outputs_{step}', outputs.detach())  # here",
    ),
    "tensors that refer to each other": Case(
        kind="linked",
        before="last = None",
        after=(
            "kept = outputs.detach()\nkept.before = last  # here\nlast = kept  # here: it takes"
            " both"
        ),
    ),
    "pairs in a tuple": Case(
        kind="value", before="pairs = ()", after="pairs += ((step, outputs.detach()),)  # here"
    ),
}
"""Written when the trace was done; those whose line was wrong at first were fixed then: they are
held out no more."""
