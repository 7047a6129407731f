"""Signatures of checkpoints that cannot be loaded: another model, damaged or half-written files.

Those that cannot be saved lie in ``saving``; other formats in ``data_files``; states of optimizers in ``optimizers``.
"""

from __future__ import annotations

from holdfast.explain.signature import Signature

SIGNATURES: tuple[Signature, ...] = (
    Signature(
        id="H977",
        title="a checkpoint of a model with other sizes",
        family="checkpoint",
        rank=60,
        patterns=(
            r"\bsize mismatch for [\w.]+: copying a param with shape torch\.Size\(",
            r'\bWhile copying the parameter named "[\w.]+", whose dimensions in the model are',
        ),
        means="The names fit, and some tensors have another shape: another number of classes, a larger vocabulary, "
        "other widths. `strict=False` does not pass over them.",
        fix="Build the model with the arguments of the checkpoint. For fine-tuning drop the tensors of the head "
        "from the state dict before loading, then load with `strict=False` and check what it returns as missing.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nRuntimeError: '
        "Error(s) in loading state_dict for Sequential:\n\tsize mismatch for 1.weight: copying a param with shape "
        "torch.Size([1000, 16]) from checkpoint, the shape in current model is torch.Size([10, 16]).",
        seen="reproduced on torch 2.13",
        also={
            "torch 0.3": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            'RuntimeError: While copying the parameter named "fc.weight", whose dimensions in the model are '
            "torch.Size([10, 512]) and whose dimensions in the checkpoint are torch.Size([1000, 512]).",
        },
    ),
    Signature(
        id="H978",
        title="a checkpoint with other names of parameters",
        family="checkpoint",
        rank=61,
        patterns=(
            r"\b(?:Missing|Unexpected) key\(s\) in state_dict: ",
            r'\bunexpected key "[\w.]+" in state_dict\b',
            r'\bWhile copying the parameter named "[\w.]+", expected torch\.Tensor or Tensor-like object',
        ),
        means="The names in the checkpoint are not those of the model: a prefix of DataParallel or DDP (`module.`) "
        "or of `torch.compile` (`_orig_mod.`), a renamed layer, or the whole checkpoint in place of its "
        "`state_dict` entry.",
        fix="Print the first keys of both. Take the right entry (`checkpoint['state_dict']`), strip the prefix "
        "(`{k.removeprefix('module.'): v for k, v in state.items()}`), and save `model.module.state_dict()` from "
        "now on. Use `strict=False` only for keys that you have read.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nRuntimeError: '
        'Error(s) in loading state_dict for Sequential:\n\tMissing key(s) in state_dict: "0.weight", '
        '"0.bias". \n\tUnexpected key(s) in state_dict: "module.0.weight", "module.0.bias". ',
        seen="reproduced on torch 2.13",
        also={
            "torch 0.3": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nKeyError: '
            "'unexpected key \"module.conv1.weight\" in state_dict'",
        },
    ),
    Signature(
        id="H979",
        title="a checkpoint that was cut off: half-written or empty",
        family="checkpoint",
        rank=60,
        patterns=(
            r"\bfailed finding central directory\b",
            r"\bPytorchStreamReader failed reading (?:zip archive|file [\w./-]+): (?!file not found)",
            r"\bRan out of input\b",
            r"\bunexpected EOF, expected \d+ more bytes\. The file might be corrupted",
            r"\bFile (?:size|format) [^\n]{0,80}corrupt",
            r"\A(?:EOFError)?\Z",
        ),
        exceptions=("RuntimeError", "EOFError", "OSError"),
        frames=(r"torch/(?:serialization|jit/_serialization)\.py:", r"torch/_weights_only_unpickler\.py:"),
        only_exceptions=True,
        means="The end of the file is missing: the process was killed, or the disk was full, while it was being "
        "written to its final name.",
        fix="Take the checkpoint before it. Then write checkpoints whole: to another name, fsync, rename, as a "
        "`holdfast.Guard` does, so that a kill never leaves a half one.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n  File '
        '".venv/lib/python3.11/site-packages/torch/serialization.py", line 1567, in load\n  File '
        '".venv/lib/python3.11/site-packages/torch/serialization.py", line 788, in __init__\nRuntimeError: '
        "PytorchStreamReader failed reading zip archive: failed finding central directory",
        seen="reproduced on torch 2.13",
        also={
            "empty file": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n  File '
            '".venv/lib/python3.11/site-packages/torch/serialization.py", line 1605, in load\n  File '
            '".venv/lib/python3.11/site-packages/torch/serialization.py", line 1883, in _legacy_load\nEOFError: '
            "Ran out of input",
            "torch 1.4": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n  File '
            '".venv/lib/python3.11/site-packages/torch/serialization.py", line 529, in load\nRuntimeError: '
            "unexpected EOF, expected 7491165 more bytes. The file might be corrupted.",
        },
    ),
    Signature(
        id="H982",
        title="a checkpoint with more than tensors, or no checkpoint at all (weights_only)",
        family="checkpoint",
        rank=60,
        patterns=(
            r"\bWeights only load failed\b",
            r"\bUnsupported (?:global|operand|class|type id)\b[^\n]{0,200}\bweights_only\b",
        ),
        means="Since torch 2.6 `torch.load` takes only tensors and plain values. The file holds another class (a "
        "Namespace, a numpy scalar, the whole model), or it is no checkpoint: a web page, a pointer of git LFS.",
        fix="Read which global it names. Look at the beginning of the file (`head -c 200`): HTML or `version "
        "https://git-lfs` means that it must be downloaded again. If you trust its source, allow the class "
        "(`torch.serialization.add_safe_globals`) or pass `weights_only=False` once and save it anew as plain "
        "values.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
        "_pickle.UnpicklingError: Weights only load failed. This file can still be loaded, to do so you have two "
        "options, do those steps only if you trust the source of the checkpoint. \n\t(1) In PyTorch 2.6, we "
        "changed the default value of the `weights_only` argument in `torch.load` from `False` to `True`.",
        seen="reproduced on torch 2.13",
        also={
            "torch 2.3": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "_pickle.UnpicklingError: Weights only load failed. Re-running `torch.load` with `weights_only` set to "
            "`False` will likely succeed, but it can result in arbitrary code execution.Do it only if you get the "
            "file from a trusted source. WeightsUnpickler error: Unsupported class numpy.core.multiarray.scalar",
        },
    ),
    Signature(
        id="H983",
        title="a checkpoint file full of zeros, or an old archive",
        family="checkpoint",
        rank=59,
        patterns=(r"\bwith files saved in the\s+legacy \.tar format\b",),
        means="The file begins like the archive of very old torch versions, which a file of zeros does too: a "
        "power cut or a full network disk left the size without the data.",
        fix="Look at the first bytes (`head -c 64 FILE | xxd`). If they are zeros, take the checkpoint before it; "
        "else load it once with `weights_only=False` if you trust it, and save it anew.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nRuntimeError: '
        "Cannot use ``weights_only=True`` with files saved in the legacy .tar format. In PyTorch 2.6, we changed "
        "the default value of the `weights_only` argument in `torch.load` from `False` to `True`.",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H984",
        title="a damaged safetensors file, or another kind of file under that name",
        family="checkpoint",
        rank=60,
        patterns=(
            r"\bError while deserializing header: ",
            r"\bSafetensorError: [^\n]{0,40}(?:header|incomplete|InvalidOffset|MetadataIncomplete)",
        ),
        means="The header does not fit the file: it was cut off, it is empty, or it is a pointer of git LFS, a web "
        "page or a file of `torch.save`.",
        fix="Look at the size and the first bytes of the file. Download it again, or take the checkpoint before "
        "it; if it is a file of `torch.save`, load it with `torch.load`.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
        "safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata, file not fully "
        "covered",
        seen="reproduced on torch 2.13",
        also={
            "safetensors 0.3": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge",
        },
    ),
    Signature(
        id="H985",
        title="a pickled object of a module that is not there",
        family="checkpoint",
        rank=76,
        patterns=(r"\bNo module named '[\w.]+'",),
        exceptions=("ModuleNotFoundError", "ImportError"),
        frames=(
            r"torch/serialization\.py:",
            r":find_class$",
            r"\bpickle\.py:load",
            r"joblib/numpy_pickle\.py:",
        ),
        only_exceptions=True,
        means="A whole model or object was pickled, and pickle imports its class by the name of its module, which "
        "was moved, renamed or belongs to a package that is not installed here.",
        fix="Run from the folder where that module is, or give it its old name again (`sys.modules['models'] = "
        "architectures`). Then save `state_dict()` rather than the model.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n  File '
        '".venv/lib/python3.11/site-packages/torch/serialization.py", line 1605, in load\n  File '
        '".venv/lib/python3.11/site-packages/torch/serialization.py", line 2178, in find_class\n'
        "ModuleNotFoundError: No module named 'models'",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1330",
        title="a checkpoint without the key that is asked for",
        family="checkpoint",
        rank=75,
        patterns=(
            (
                r"\A'?(?:model|net|ema|optim(?:izer)?|(?:lr_)?scheduler|(?:grad_)?scaler|param_groups|epoch|"
                r"global_step|best_\w{1,20}|\w{0,40}_?state_dict|\w{1,40}_state|rng_states?|hyper_parameters|"
                r"pytorch-lightning_version)'?\Z"
            ),
        ),
        exceptions=("KeyError",),
        only_exceptions=True,
        means="The dictionary that was loaded has other keys than the code that resumes: it holds the bare weights "
        '(a "best" file), or another script wrote it under other names.',
        fix="Print `checkpoint.keys()`. Take the key that is there; to resume use the file with optimizer and "
        "epoch, not the one with weights only.",
        false_positives="Any dictionary with such a key, a configuration for instance.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nKeyError: '
        "'model_state_dict'",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1331",
        title="load_state_dict given something that is no state dict",
        family="checkpoint",
        rank=60,
        patterns=(
            r"\bExpected state_dict to be dict-like, got\b",
            r"'(?:str|PosixPath)' object has no attribute '(?:copy|keys|items)'",
        ),
        exceptions=("TypeError", "AttributeError"),
        means="It takes the dictionary that `torch.load` returns. It got a path, a whole model or something else.",
        fix="Call `model.load_state_dict(torch.load(path))`; for a whole model `loaded.state_dict()`.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nTypeError: '
        "Expected state_dict to be dict-like, got <class 'str'>.",
        seen="reproduced on torch 2.13",
        also={
            "torch 1.8": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "AttributeError: 'str' object has no attribute 'copy'",
        },
    ),
    Signature(
        id="H1334",
        title="a pickled object whose class is not where it was",
        family="checkpoint",
        rank=60,
        patterns=(r"\bCan't get attribute '[\w.]+' on <module '[\w.]+'",),
        means="The class was defined in the script or notebook that saved the object (`__main__`), or was renamed "
        "since; pickle looks for it there.",
        fix="Import the class into the script that loads before loading, under the same name. Then save "
        "`state_dict()` rather than the whole model.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n  File '
        '".venv/lib/python3.11/site-packages/torch/serialization.py", line 2178, in find_class\nAttributeError: '
        "Can't get attribute 'Net' on <module '__main__' from 'train.py'>",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1335",
        title="a damaged pickle, or another kind of file",
        family="checkpoint",
        rank=62,
        patterns=(
            r"\binvalid load key, ",
            r"\bpickle data was truncated\b",
            r"\bRan out of input\b",
            r"\bInvalid magic number; corrupt file\b",
            r"\bunpickling stack underflow\b",
            r"\bcould not find MARK\b",
            r"\bunsupported pickle protocol: \d+",
        ),
        exceptions=("UnpicklingError", "EOFError", "RuntimeError", "ValueError", "IndexError"),
        means="The bytes are no whole pickle: cut off, empty, or a web page (`invalid load key, '<'`), a pointer "
        "of git LFS (`'v'`) or another format.",
        fix="Look at the size and the first bytes of the file. Download or compute it again; write such caches to "
        "another name and rename them when they are whole.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
        "_pickle.UnpicklingError: invalid load key, '<'.",
        seen="reproduced on torch 2.13",
        also={
            "cut off": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "_pickle.UnpicklingError: pickle data was truncated",
            "empty": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nEOFError: Ran '
            "out of input",
        },
    ),
    Signature(
        id="H1337",
        title="a distributed checkpoint that does not fit, or was not finished",
        family="checkpoint",
        rank=60,
        patterns=(
            r"\bMissing key in checkpoint state_dict: ",
            r"\bSize mismatch between saved torch\.Size",
            r"\bmetadata is None\b",
            r"\bNo such file or directory: '[^'\n]{0,300}\.metadata'",
            r"\bFailed to validate global plan\b",
            r"\bCheckpointException ranks:",
            r"\bInvalid checkpoint metadata for\b",
        ),
        means="A key or a size of the model is not that of the checkpoint, or the file `.metadata`, which is "
        "written last, is missing: saving was cut off.",
        fix="If `.metadata` is missing take the checkpoint before it. Else print the keys of both "
        "(`FileSystemReader(path).read_metadata()`), and use the same wrapping of the model as when it was saved.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
        "torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([0])",
        seen="reproduced on torch 2.13",
        also={
            "planner": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "RuntimeError: Missing key in checkpoint state_dict: model.weight.",
        },
    ),
    Signature(
        id="H1340",
        title="a TorchScript file and a checkpoint mistaken for each other",
        family="checkpoint",
        rank=59,
        patterns=(
            r"\bPytorchStreamReader failed locating file (?:constants\.pkl|data\.pkl|\.data/[\w]+): file not found",
            r"\bwith TorchScript archives passed to\b",
            r"\bdid you mean to use torch\.jit\.load\(\)\?",
        ),
        means="`torch.jit.load` reads what `torch.jit.save` wrote, and `torch.load` what `torch.save` wrote; both "
        "are zip files and may have the same suffix.",
        fix="Use the other function: `torch.load` for a state dict, `torch.jit.load` for a scripted or traced model.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nRuntimeError: '
        "PytorchStreamReader failed locating file constants.pkl: file not found",
        seen="reproduced on torch 2.13",
        also={
            "reverse": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "RuntimeError: Cannot use ``weights_only=True`` with TorchScript archives passed to ``torch.load``. In "
            "PyTorch 2.6, we changed the default value of the `weights_only` argument in `torch.load` from `False` "
            "to `True`.",
        },
    ),
    Signature(
        id="H1341",
        title="a pretrained model that is not where its name says",
        family="environment",
        patterns=(
            r"\bError no file named [\w., ]{1,200} found in directory\b",
            r"\bis not a local folder and is not a valid model identifier listed on\b",
            (
                r"\bCan't load (?:tokenizer|config|feature extractor|image processor|the configuration|the model) "
                r"(?:for|of) '"
            ),
            r"\bRepositoryNotFoundError\b|\bGatedRepoError\b",
        ),
        means="The name is no folder here and no model on the hub, the folder lacks the weights, or the model is "
        "private and no login was given.",
        fix="Check the spelling and the working directory, list the folder, log in for gated models, and on nodes "
        "without a network download it before (`HF_HUB_OFFLINE=1` then shows what is missing).",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nOSError: '
        "bert-base-uncasd is not a local folder and is not a valid model identifier listed on "
        "'https://huggingface.co/models'\nIf this is a private repository, make sure to pass a token having "
        "permission to this repo either by logging in with `huggingface-cli login` or by passing "
        "`token=<your_token>`",
        seen="text of transformers; not reproduced, it is no dependency",
        also={
            "folder": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nOSError: '
            "Error no file named pytorch_model.bin, model.safetensors, tf_model.h5, model.ckpt.index or "
            "flax_model.msgpack found in directory ./output.",
        },
    ),
)
