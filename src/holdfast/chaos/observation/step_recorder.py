"""Record the parts of one optimizer step: model calls, batches, random states and losses.

Not every model call contributes to a step: a script may also call a model to act in an environment
or to evaluate the model, and the backward pass after a call may fail. To find the calls that
contribute, the number of each call is stored on the autograd nodes of the model's output. When a
backward pass begins, these numbers identify the calls that contributed to its loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.chaos.observation.digests import DigestMaker, find_tensors

# The key under which an autograd node's metadata contains the number of a model call.
CALL_KEY = "call seen by holdfast chaos"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """The inputs and random states of a model call.

    Args:
        batch: The digest of the last batch that the loader returned before the call; None without
            a batch.
        inputs: The digest of the inputs; None if the call itself was not observed.
        random: The digests of the random states before the call, by the generator's name.
    """

    batch: str | None
    inputs: str | None
    random: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardPass:
    """A backward pass that has begun.

    Args:
        calls: The numbers of the model calls that contributed to the loss.
        loss: The loss as a string, so that no digit is lost; None if it is not a single number.
    """

    calls: set[int]
    loss: str | None


class StepRecorder:
    """Collects the parts of the current optimizer step.

    Args:
        torch: The torch module that the script has imported.
        digests: The object that computes digests.
    """

    def __init__(self, torch: Any, digests: DigestMaker) -> None:
        self._torch = torch
        self._digests = digests
        self.restart()

    def restart(self) -> None:
        """Forget all recorded data. This method is called in a newly forked process."""
        # How many times models were called for training in this process.
        self._calls_made = 0
        # The number of the call that each module is currently computing, by the module's ``id()``.
        self._open_calls: dict[int, int] = {}
        self._last_batch: str | None = None
        self.begin_step()

    def begin_step(self) -> None:
        """Start collecting the parts of the next step."""
        # All model calls since the last step, by their numbers.
        self._calls: dict[int, ModelCall] = {}
        # The numbers of the calls that contributed to a loss.
        self._contributing: set[int] = set()
        self._losses: list[str] = []
        # Whether backward was called since the last step.
        self.has_backward = False

    def note_batch(self, batch: Any) -> None:
        """Record a batch that a loader has returned."""
        self._last_batch = self._digests.tree(batch)

    def begin_call(self, module: Any, inputs: Any) -> None:
        """Record the inputs of a model call and the random states before it, when it begins."""
        self._calls_made += 1
        self._open_calls[id(module)] = self._calls_made
        self._calls[self._calls_made] = ModelCall(
            batch=self._last_batch,
            inputs=self._digests.tree(inputs),
            random=self._digests.random_states(),
        )

    def end_call(self, module: Any, output: Any) -> None:
        """Store the number of a model call on the autograd nodes of its output."""
        call = self._open_calls.pop(id(module), None)
        if call is None:
            return
        nodes = [tensor.grad_fn for tensor in find_tensors(self._torch, output)]
        nodes = [node for node in nodes if node is not None]
        for node in nodes:
            node.metadata[CALL_KEY] = call
        if not nodes:
            # Without autograd nodes, no loss can be traced back to this call. Assume that the call
            # contributes to the step.
            self._contributing.add(call)

    def begin_backward(self, roots: list[Any]) -> BackwardPass:
        """Return a description of a backward pass, to pass to `end_backward` if the pass succeeds.

        Args:
            roots: The tensors on which backward is called, such as the loss.
        """
        self.has_backward = True
        if not self._calls:
            # No model call was observed, for example because the script has no module. Count the
            # backward pass itself as the only part of the step.
            self._calls_made += 1
            self._calls[self._calls_made] = ModelCall(
                batch=self._last_batch, inputs=None, random=self._digests.random_states()
            )
        loss = None
        if roots and hasattr(roots[0], "numel") and roots[0].numel() == 1:
            loss = repr(roots[0].item())
        return BackwardPass(calls=self._find_calls(roots), loss=loss)

    def end_backward(self, backward: BackwardPass) -> None:
        """Record the calls and the loss of a backward pass that has succeeded.

        A failed backward pass is not recorded, because the script may repeat it.
        """
        self._contributing |= backward.calls
        if backward.loss is not None:
            self._losses.append(backward.loss)

    def facts(self) -> dict[str, Any]:
        """Return the fields of `trace.RecordedStep` that describe the parts of the step.

        A part is a model call that contributed to a loss.
        """
        calls = list(self._calls.values())
        parts = [call for number, call in self._calls.items() if number in self._contributing]
        # If no call was found in the graph of any loss, all calls count as parts.
        parts = parts or calls
        return {
            "parts": len(parts),
            "batch": [part.batch for part in parts],
            "inputs": [part.inputs for part in parts],
            "random": parts[0].random if parts else {},
            "random_states": [call.random for call in calls],
            "losses": self._losses,
        }

    def _find_calls(self, roots: list[Any]) -> set[int]:
        """Return the numbers of the model calls that the tensors `roots` were computed from."""
        calls: set[int] = set()
        pending = {getattr(root, "grad_fn", None) for root in roots} - {None}
        visited = set(pending)
        while pending and not self._calls.keys() <= calls:
            node: Any = pending.pop()
            if CALL_KEY in node.metadata:
                calls.add(node.metadata[CALL_KEY])
            inputs = {input_node for input_node, _ in node.next_functions}
            new_nodes = inputs - visited - {None}
            pending |= new_nodes
            visited |= new_nodes
        return calls
