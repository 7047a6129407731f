"""Signatures of checkpoints that cannot be saved.

Those that cannot be loaded lie in ``checkpoints``.
"""

from __future__ import annotations

from holdfast.explain.signature import Signature

SIGNATURES: tuple[Signature, ...] = (
    Signature(
        id="H980",
        title="a checkpoint could not be written to its end: mostly a full disk",
        family="storage",
        rank=40,
        patterns=(
            r"\bunexpected pos \d+ vs \d+",
            r"\bPytorchStreamWriter failed (?:writing|closing|to)",
            r"\bf?write\(\): fd \d+ failed with\b",
            r"\bbasic_ios::clear: iostream error\b",
            r"\binline_container\.cc:\d+\b[^\n]{0,40}\bunexpected pos\b",
        ),
        means='`torch.save` wrote fewer bytes than it meant to. The words "no space" do not appear, and a stump of '
        "the file stays. A full disk, a quota or a limit of the file size is behind it.",
        fix="Look at `df -h` and `quota` of that folder and remove old checkpoints and the stump. Keep only the "
        "newest few (`keep_latest_k`), and do not load the file that was being written.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n  File '
        '".venv/lib/python3.11/site-packages/torch/serialization.py", line 968, in save\nRuntimeError: [enforce '
        "fail at inline_container.cc:672] . unexpected pos 16778688 vs 16778640",
        seen="reproduced on torch 2.13",
        also={
            "torch 1.13": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "RuntimeError: [enforce fail at inline_container.cc:319] . unexpected pos 304042240 vs 304042136",
        },
    ),
    Signature(
        id="H1332",
        title="something in the checkpoint cannot be pickled",
        family="checkpoint",
        rank=60,
        patterns=(
            r"\bcannot pickle '[\w.]+' object",
            r"\bCan't (?:pickle|get) local object\b",
            r"\bCan't pickle <[^\n]{1,200}>: (?:attribute lookup|it's not)",
            r"\bCan't pickle local object\b",
        ),
        exceptions=("TypeError", "AttributeError", "PicklingError"),
        frames=(r"torch/serialization\.py:(?:save|_save|_legacy_save)",),
        only_exceptions=True,
        means="`torch.save` pickles everything that it is given. A lock, a generator, an open file, a lambda or a "
        "class made inside a function cannot be pickled.",
        fix="Save `state_dict()` of model, optimizer and schedule and plain values, never the objects. Move "
        "lambdas and classes to the top of a module if they must be saved.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n  File '
        '".venv/lib/python3.11/site-packages/torch/serialization.py", line 968, in save\n  File '
        '".venv/lib/python3.11/site-packages/torch/serialization.py", line 1234, in _save\nTypeError: cannot '
        "pickle '_thread.lock' object",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1333",
        title="the folder to save into does not exist",
        family="storage",
        rank=60,
        patterns=(
            r"\bParent directory [^\n]{1,400} does not exist\b",
            r"\bCannot save file into a non-existent directory\b",
        ),
        means="`torch.save` makes no folders.",
        fix="`Path(path).parent.mkdir(parents=True, exist_ok=True)` at the start of the training, so that it fails "
        "at once and not after the first epoch.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nRuntimeError: '
        "Parent directory checkpoints/run1 does not exist.",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1336",
        title="tensors that safetensors does not save as they are",
        family="checkpoint",
        rank=60,
        patterns=(
            r"\bSome tensors share memory, this will lead to duplicate memory on disk\b",
            r"\bYou are trying to save a (?:non contiguous|sparse) tensors?:",
            r"\bKey `[^`\n]{1,200}` is invalid, expected torch\.Tensor but received\b",
            r"\bExpected a dict of \[str, torch\.Tensor\] but received\b",
        ),
        exceptions=("RuntimeError", "ValueError"),
        means="Safetensors takes tensors only, each with memory of its own in order: tied weights, transposed "
        "views and numbers are refused.",
        fix="Use `safetensors.torch.save_model(model, path)`, which knows tied weights; call `.contiguous()` on "
        "views; keep numbers in a JSON file beside it.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
        "RuntimeError: \n            Some tensors share memory, this will lead to duplicate memory on disk and "
        "potential differences when loading them again: [{'head.weight', 'embed.weight'}].\n            A "
        "potential way to correctly save your model is to use `save_model`.",
        seen="reproduced on torch 2.13",
        also={
            "view": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nValueError: '
            "You are trying to save a non contiguous tensor: `weight` which is not allowed. It either means you "
            "are trying to save tensors which are reference of each other in which case it's recommended to save "
            "only the full tensors, and reslice at load time, or simply call `.contiguous()` on your tensor to "
            "pack it before saving.",
        },
    ),
)
