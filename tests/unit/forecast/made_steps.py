"""Training steps for the tests of forecasts.

Played by a small autograd that counts references, checkpoints included.

A program is a list of blocks, a block a list of layers.

Does not: compute, or use the code that is tested.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from holdfast.forecast.trace.events import DTYPES, OWNERS, PHASES, Trace

# What a layer saves for its backward pass.
SAVES = {"linear": "input", "gelu": "input", "relu": "output", "dropout": "mask", "add": "nothing"}


@dataclass(frozen=True)
class Layer:
    """A layer of a kind in `SAVES`: bytes of its output, and while it runs, for each sample.

    Fixed ones besides.
    """

    kind: str
    width: int
    scratch: int = 0
    fixed: int = 0


Block = tuple[Layer, ...]
LINE = "model.py:7 in forward"


@dataclass
class Machine:
    """What happens, and who holds which storage."""

    events: list[int] = field(default_factory=list)
    phases: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    holders: list[int] = field(default_factory=list)
    operations: list[tuple[str, int, int, int, int]] = field(default_factory=list)
    phase: int = 0
    silent: bool = True

    def allocate(self, size: int, owner: str = "activations") -> int:
        self.sizes.append(size)
        self.owners.append(OWNERS.index(owner))
        self.holders.append(1)
        self._note(len(self.sizes))
        return len(self.sizes) - 1

    def hold(self, storage: int) -> int:
        assert self.holders[storage] > 0
        self.holders[storage] += 1
        return storage

    def drop(self, *storages: int) -> None:
        for storage in storages:
            self.holders[storage] -= 1
            if self.holders[storage] == 0:
                self._note(-storage - 1)

    def operate(self, name: str, flops: int = 0, moved_bytes: int = 0) -> None:
        if not self.silent:
            self.operations.append((name, len(self.events), self.phase, flops, moved_bytes))

    def _note(self, event: int) -> None:
        if not self.silent:
            self.events.append(event)
            self.phases.append(self.phase)


@dataclass
class Node:
    """A layer's part of the graph."""

    layer: Layer
    parameter: int | None
    saved: list[int]


def make_step(
    blocks: Sequence[Block],
    batch: int,
    *,
    recompute: Iterable[int] = (),
    optimizer_bytes: int = 0,
    branch_at: int | None = None,
) -> Trace:
    """Return the trace of a step, in which the blocks in `recompute` run under a checkpoint.

    `optimizer_bytes` is scratch of the optimizer; 0 leaves it out. After the block `branch_at` an
    operation runs that others do not have.
    """
    step = _Step(blocks, batch, frozenset(recompute))
    step.play(optimizer_bytes, branch_at)
    return step.trace()


class _Step:
    def __init__(self, blocks: Sequence[Block], batch: int, recompute: frozenset[int]) -> None:
        self.machine = Machine()
        self.blocks = blocks
        self.batch = batch
        self.recompute = recompute
        self.parameters = [
            [
                (
                    self.machine.allocate(16 * layer.width + 4, "parameters")
                    if layer.kind == "linear"
                    else None
                )
                for layer in block
            ]
            for block in blocks
        ]
        self.gradients: dict[int, int] = {}
        self.found = {
            parameter: self.machine.allocate(self.machine.sizes[parameter], "gradients")
            for block in self.parameters
            for parameter in block
            if parameter is not None
        }
        self.optimizer_steps: list[tuple[int, int]] = []
        # Block, nodes or none yet, a frame's input
        self.graphs: list[tuple[int, list[Node], int | None]] = []

    def play(self, optimizer_bytes: int, branch_at: int | None) -> None:
        machine = self.machine
        first = machine.allocate(64 * self.batch, "batch")
        self.resident = len(machine.sizes)
        machine.silent = False
        for gradient in self.found.values():
            machine.drop(gradient)
        value = machine.hold(first)
        for block in range(len(self.blocks)):
            value = self._forward(block, value)
            if branch_at == block:
                machine.operate("aten.index_put")
                machine.drop(machine.allocate(8))
        loss = machine.allocate(4)
        machine.operate("aten.sum", moved_bytes=4 + machine.sizes[value])
        machine.drop(value)
        self._backward(loss, machine.sizes[value])
        if optimizer_bytes:
            self._optimize(optimizer_bytes)
        machine.phase = PHASES.index("other")
        machine.drop(loss)

    def _forward(self, block: int, value: int) -> int:
        machine = self.machine
        # What a checkpoint holds, torch ties to the tensors that are saved under it: with the last
        # of them it goes.
        framed = block in self.recompute and any(
            SAVES[layer.kind] != "nothing" for layer in self.blocks[block]
        )
        given = machine.hold(value)
        frame = machine.hold(value) if framed else None
        value, nodes = self._layers(block, value, keeps=not framed)
        self.graphs.append((block, [] if framed else nodes, frame))
        machine.drop(given)
        return value

    def _layers(
        self, block: int, value: int, *, keeps: bool, stops: bool = False
    ) -> tuple[int, list[Node]]:
        """Run layers, taking over the caller's hold of the value.

        `stops` at the last saved tensor, as torch does.
        """
        machine = self.machine
        nodes: list[Node] = []
        layers = self.blocks[block]
        last = max(
            (place for place, layer in enumerate(layers) if SAVES[layer.kind] != "nothing"),
            default=-1,
        )
        for place, layer in enumerate(layers):
            saves = SAVES[layer.kind]
            node = Node(layer, self.parameters[block][place], [])
            nodes.append(node)
            if saves == "input" and keeps:
                node.saved.append(machine.hold(value))
            if stops and (place > last or (place == last and saves == "input")):
                continue
            machine.operate(
                f"aten.{layer.kind}",
                flops=4 * layer.width * self.batch,
                moved_bytes=machine.sizes[value],
            )
            out = machine.allocate(layer.width * self.batch + layer.fixed)
            if layer.scratch:
                machine.drop(machine.allocate(layer.scratch * self.batch, "scratch"))
            if saves == "output" and keeps:
                node.saved.append(machine.hold(out))
            if saves == "mask":
                mask = machine.allocate(layer.width * self.batch // 4 + 1)
                if keeps:
                    node.saved.append(machine.hold(mask))
                machine.drop(mask)
            machine.drop(value)
            value = out
        return value, nodes

    def _backward(self, loss: int, size: int) -> None:
        machine = self.machine
        machine.phase = PHASES.index("backward")
        machine.operate("aten.expand")
        gradient = machine.allocate(size, "other")
        for block, nodes, frame in reversed(self.graphs):
            if frame is not None:
                value, nodes = self._layers(block, machine.hold(frame), keeps=True, stops=True)
                machine.drop(value)
            saving = [node for node in nodes if node.saved]
            for node in reversed(nodes):
                gradient = self._node_backward(node, gradient)
                if frame is not None and node is saving[0]:
                    machine.drop(frame)
        machine.drop(gradient)

    def _node_backward(self, node: Node, gradient: int) -> int:
        machine = self.machine
        machine.operate(f"aten.{node.layer.kind}_backward", flops=8 * node.layer.width * self.batch)
        before = machine.allocate(node.layer.width * self.batch + 8, "other")
        if node.parameter is not None:
            made = machine.allocate(machine.sizes[node.parameter], "gradients")
            if node.parameter in self.gradients:
                machine.drop(made)
            else:
                self.gradients[node.parameter] = made
        machine.drop(gradient)
        machine.drop(*node.saved)
        return before

    def _optimize(self, scratch: int) -> None:
        machine = self.machine
        machine.phase = PHASES.index("optimizer")
        begin = len(machine.events)
        machine.operate("aten.add_", moved_bytes=scratch)
        machine.drop(machine.allocate(scratch, "other"))
        self.optimizer_steps.append((begin, len(machine.events)))

    def trace(self) -> Trace:
        machine = self.machine
        names = tuple(dict.fromkeys(name for name, *_ in machine.operations))
        columns = list(zip(*machine.operations, strict=True))
        storages = len(machine.sizes)
        return Trace(
            events=np.array(machine.events, dtype=np.int32),
            event_phase=np.array(machine.phases, dtype=np.int8),
            size_bytes=np.array(machine.sizes, dtype=np.int64),
            owner=np.array(machine.owners, dtype=np.int8),
            module=np.zeros(storages, dtype=np.int32),
            line=np.ones(storages, dtype=np.int32),
            operation_name=np.array([names.index(name) for name in columns[0]], dtype=np.int32),
            operation_event=np.array(columns[1], dtype=np.int32),
            operation_phase=np.array(columns[2], dtype=np.int8),
            flops=np.array(columns[3], dtype=np.int64),
            moved_bytes=np.array(columns[4], dtype=np.int64),
            dtype=np.full(len(machine.operations), DTYPES.index("fp32"), dtype=np.int8),
            modules=("", *(f"blocks.{number}" for number in range(len(self.blocks)))),
            lines=("", LINE),
            names=names,
            resident=tuple(range(self.resident)),
            carried=tuple(
                (made, self.found[parameter]) for parameter, made in self.gradients.items()
            ),
            growth_bytes=0,
            blocks=tuple(f"blocks.{number}" for number in range(len(self.blocks))),
            optimizer_steps=tuple(self.optimizer_steps),
            micro_batch_size=self.batch,
            precision="fp32",
            route="cpu",
            assumptions=(),
        )
