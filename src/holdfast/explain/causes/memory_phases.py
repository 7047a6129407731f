"""Tell from the stack whether GPU memory ran out in a training step or elsewhere.

The advice for a training step, such as a smaller micro-batch or activation checkpointing, is of no
use while a model is loaded, and evaluation needs none of the memory that backward needs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from holdfast.explain.evidence import Frame
from holdfast.explain.signatures.signature import Signature

# Functions of scripts and of trainers that evaluate a model.
_EVALUATION = re.compile(
    r"_?(?:run_)?(?:eval|evaluate|evaluation|valid|validate|validation|val|test)"
    r"(?:_(?:model|step|loop|epoch|one_epoch|dataset|loader))?"
    r"|(?:do|run|log)_(?:eval|test|validation)|prediction_(?:step|loop)|_run_sanity_check"
    r"|(?:evaluate|validate)_\w+",
    re.IGNORECASE,
)
_BACKWARD = re.compile(r"/torch/(?:_tensor|tensor|autograd/__init__)\.py$")
_OPTIMIZER = re.compile(r"/torch/optim/")
# Where the parameters of a module are moved, and where a checkpoint is read.
_MOVE = re.compile(r"/torch/nn/modules/module\.py$")
_MOVING_FUNCTIONS = frozenset({"_apply", "convert", "<lambda>", "to", "cuda"})
_CHECKPOINT = re.compile(r"/torch/serialization\.py$|/safetensors/torch\.py$|/modeling_utils\.py$")
_LOADING_FUNCTION = re.compile(r"load|persistent|restore_location|_deserialize|from_pretrained")

_MEANS_OF_EVALUATION = (
    "torch's caching allocator found no free block on the GPU. The stack shows that the run was"
    " evaluating the model, which needs less memory than training unless it records the autograd"
    " graph, uses a larger batch, or keeps its outputs on the GPU."
)
_FIX_OF_EVALUATION = (
    "Evaluate inside `with torch.no_grad():` (or `torch.inference_mode()`), with a smaller"
    " evaluation batch, and move the outputs and losses that you keep to the CPU at every step"
    " (`.item()`, `.cpu()`; `eval_accumulation_steps` in the Hugging Face Trainer). If it still"
    " fails, free what training holds before: `del loss, outputs` and `optimizer.zero_grad()`."
)
_MEANS_OF_LOADING = (
    "torch's caching allocator found no free block on the GPU. The stack shows that a model or a"
    " checkpoint was being moved to the GPU, so the batch is not to blame: the weights do not fit"
    " beside what is there already."
)
_FIX_OF_LOADING = (
    "Look at `nvidia-smi` for other processes on this GPU, and choose a free one with"
    " CUDA_VISIBLE_DEVICES. Load checkpoints with `map_location='cpu'`, so that the weights are not"
    " on the GPU twice and not every rank uses GPU 0. If the weights alone are larger than the GPU,"
    " load them in 16 bits or quantized, or shard them (`fully_shard`, `device_map`)."
)


def outside_training(full: Signature, frames: Sequence[Frame]) -> Signature:
    """Return the signature of full GPU memory, with other words if no training step was running.

    Args:
        full: The signature of full GPU memory.
        frames: The stack of the exception, with the innermost frame last.
    """
    if _is_loading(frames):
        return replace(
            full,
            title="GPU memory is full while a model or checkpoint is moved to the GPU",
            means=_MEANS_OF_LOADING,
            fix=_FIX_OF_LOADING,
        )
    if _is_evaluating(frames):
        return replace(
            full,
            title="GPU memory is full during evaluation",
            means=_MEANS_OF_EVALUATION,
            fix=_FIX_OF_EVALUATION,
        )
    return full


def _is_loading(frames: Sequence[Frame]) -> bool:
    if not frames:
        return False
    innermost = frames[-1]
    if _MOVE.search(innermost.file):
        return innermost.function in _MOVING_FUNCTIONS
    is_checkpoint = _CHECKPOINT.search(innermost.file) is not None
    return is_checkpoint and _LOADING_FUNCTION.search(innermost.function) is not None


def _is_evaluating(frames: Sequence[Frame]) -> bool:
    """Return whether a function that evaluates is on the stack, and nothing that only trains."""
    if any(_BACKWARD.search(frame.file) or _OPTIMIZER.search(frame.file) for frame in frames):
        return False
    return any(_EVALUATION.fullmatch(frame.function) for frame in frames)
