"""Signatures of what fails before the first step: packages, syntax, command lines, settings, compilation.

Plain mistakes in running code lie in ``python_code``; shared libraries in ``system``.
"""

from __future__ import annotations

from holdfast.explain.signature import Signature

SIGNATURES: tuple[Signature, ...] = (
    Signature(
        id="H1361",
        title="a package or module is not installed or not on the path",
        family="environment",
        rank=80,
        patterns=(r"\bNo module named '?[\w.]+'?", r"\bModuleNotFoundError\b"),
        exceptions=("ModuleNotFoundError", "ImportError"),
        means="The package is not in the environment of this Python; or it is the project's own, and its folder is "
        "not on `sys.path` since the script was started from elsewhere.",
        fix="`python -m pip show NAME` with the very Python of the job; the name to install may differ (`cv2` is "
        "`opencv-python`, `yaml` is `PyYAML`). For own code start from the root with `python -m package.script`, "
        "or `pip install -e .`.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
        "ModuleNotFoundError: No module named 'apex'",
        seen="reproduced on torch 2.13",
        also={
            "python -m": "/usr/bin/python: No module named trainer",
        },
    ),
    Signature(
        id="H1362",
        title="a name cannot be imported: another version, a circle, or a file that shadows a library",
        family="environment",
        rank=79,
        patterns=(
            r"\bcannot import name '[\w.]+' from (?:partially initialized module )?'[\w.]+'",
            r"\bpartially initialized module '[\w.]+' has no attribute\b",
            r"\bcannot import name '?\w+'?\s*$",
            r"\(consider renaming '[^'\n]{1,300}' (?:since|if) it has the same name as",
        ),
        exceptions=("ImportError", "AttributeError"),
        means="The module is there and lacks that name: another version of the library, two modules that import "
        "each other, or a file of the project (`random.py`, `yaml.py`) that hides the library.",
        fix="The path at the end of the message tells which file was taken. If it is yours, rename it; if it says "
        '"partially initialized", move one import into the function that needs it; else check the version that the '
        "code was written for.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nImportError: '
        "cannot import name 'Model' from partially initialized module 'model' (most likely due to a circular "
        "import) (/home/me/model.py)",
        seen="reproduced on torch 2.13",
        also={
            "python 3.13": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "AttributeError: module 'random' has no attribute 'choice' (consider renaming '/home/me/random.py' "
            "since it has the same name as the standard library module named 'random' and prevents importing that "
            "standard library module)",
            "library": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "ImportError: cannot import name 'container_abcs' from 'torch._six' "
            "(/usr/lib/python3/dist-packages/torch/_six.py)",
        },
    ),
    Signature(
        id="H1363",
        title="a function that this version of a library does not have",
        family="environment",
        rank=78,
        patterns=(
            (
                r"\bmodule '(?:torch|numpy|scipy|sklearn|PIL|transformers|tensorboard|pkg_resources|collections|"
                r"inspect|importlib|ast|pkgutil)[\w.]*' has no attribute '\w+'"
            ),
            r"`np\.\w+` was (?:removed in the NumPy 2\.0|a deprecated alias)",
            r"\bThis function was deprecated since version [\d.]+ and is now removed\b",
            r"\bThe `\w+` (?:function|attribute|alias) (?:was|has been) removed\b",
            r"\brequires the return_complex parameter be given\b",
        ),
        exceptions=("AttributeError", "RuntimeError"),
        means="The code was written for another version: `np.float`, `np.Inf` and old torch functions were removed.",
        fix="Use the name that the message proposes (`float`, `np.inf`, `torch.linalg.eigh`). If it stands in a "
        "library, update that library or pin the older numpy or torch.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nAttributeError: '
        "module 'numpy' has no attribute 'float'.\n`np.float` was a deprecated alias for the builtin `float`. To "
        "avoid this error in existing code, use `float` by itself.",
        seen="reproduced on torch 2.13",
        also={
            "numpy 2": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "AttributeError: `np.Inf` was removed in the NumPy 2.0 release. Use `np.inf` instead.",
            "Pillow 10": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "AttributeError: module 'PIL.Image' has no attribute 'ANTIALIAS'",
        },
    ),
    Signature(
        id="H1364",
        title="the program is not valid Python",
        family="user code",
        rank=60,
        patterns=(r"(?s)\A.",),
        exceptions=("SyntaxError", "IndentationError", "TabError"),
        only_exceptions=True,
        means="A file cannot be parsed: a bracket or quote that is not closed (then the line before), a lost "
        "indentation, mixed tabs and spaces, marks of a merge conflict, or syntax of another Python version.",
        fix="Look at the line and the one before it. `python -m py_compile FILE` checks a file without running it.",
        example="  File \"train.py\", line 3\n    value = max(1, 2\n               ^\nSyntaxError: '(' was never "
        "closed",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1379",
        title="settings that do not fit their declaration",
        family="user code",
        rank=65,
        patterns=(
            r"\b\d+ validation errors? for \w+",
            r"\bKey '[^'\n]{1,200}' is not in struct\b",
            r"\bCould not override '[^'\n]{1,200}'",
            r"\bMissing mandatory value: ",
            r"\bIn '[^'\n]{1,200}': Could not (?:find|load) '",
            r"\bValue '[^'\n]{1,200}' (?:of type '\w+' )?could not be converted to\b",
        ),
        means="A setting is unknown, missing, or of another type than the class of the settings declares.",
        fix="The message names each field. Correct the file or the override; with hydra use `+name=value` for a "
        "new key.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for Settings\nlr\n  Input should be a "
        "valid number, unable to parse string as a number [type=float_parsing, input_value='fast', input_type=str]",
        seen="reproduced on torch 2.13",
        also={
            "omegaconf": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "omegaconf.errors.ConfigAttributeError: Key 'lr' is not in struct\n    full_key: lr\n    "
            "object_type=dict",
        },
    ),
    Signature(
        id="H1380",
        title="wrong arguments on the command line",
        family="user code",
        patterns=(
            (
                r"\berror: (?:the following arguments are required|unrecognized arguments|(?:argument "
                r")?[^\n]{1,80}: (?:invalid (?:\w+ )?(?:value|choice)|expected (?:one|at least one|\d+) arguments?|"
                r"not allowed with argument|ignored explicit argument)|ambiguous option|one of the arguments|too "
                r"few arguments)"
            ),
            (
                r"^(?:│ |Error: )(?:No such (?:option|command)|Missing (?:option|argument|parameter)|Invalid value "
                r"for|Got unexpected extra arguments?)\b"
            ),
        ),
        means="The parser of the script refused its arguments and left with status 2: an option is misspelt, "
        "missing or has a value that it does not take.",
        fix="Run the script with `--help` and compare. In a shell script look for a variable that is empty and for "
        "a line without `\\` at its end.",
        example="train.py: error: the following arguments are required: --data",
        seen="reproduced on torch 2.13",
        also={
            "click": "Error: No such option: --learning-rate",
        },
    ),
    Signature(
        id="H1381",
        title="an environment variable is not set",
        family="environment",
        rank=86,
        patterns=(
            r"\A'?[A-Z][A-Z0-9_]*'?\Z",
            (
                r"\benvironment variable [\w'\x22`]{2,80} (?:is )?(?:not set|missing|must be set|expected, but not "
                r"set)\b"
            ),
        ),
        exceptions=("KeyError", "ValueError", "RuntimeError", "OSError", "EnvironmentError"),
        frames=(r"(?:^|[/\\])os\.py:__getitem__$", r"<frozen os>:__getitem__$"),
        only_exceptions=True,
        means="The script reads a variable of the environment that is not set where it runs: schedulers, "
        "containers and `sudo` do not pass on all of them.",
        fix="Export it in the script of the job (`export NAME=...`, `--export=ALL`, `docker run -e NAME`), or read "
        "it with a default: `os.environ.get(NAME, ...)`.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n  File "<frozen '
        "os>\", line 679, in __getitem__\nKeyError: 'DATA_ROOT'",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1384",
        title="torch.compile or torch.export fails in its backend or on a branch that depends on data",
        family="environment",
        rank=71,
        patterns=(
            r"\bbackend='[^'\n]{1,60}' raised:",
            r"\bInvalid backend: '",
            r"\bCould not (?:guard on|extract specialized integer from) data-dependent expression\b",
            r"\b(?:CppCompileError|C\+\+ compile error)\b|\bCannot find a working triton installation\b",
            r"\bDetected mismatch between the structure of `inputs`",
            r"\bConstraints violated \(",
            r"\bsymbolically traced variables cannot be used as inputs to control flow\b",
            r"\bExpecting `args` to be a tuple of example positional inputs\b",
        ),
        exceptions=(
            "BackendCompilerFailed",
            "InvalidBackend",
            "InductorError",
            "CppCompileError",
            "InvalidCxxCompiler",
            "GuardOnDataDependentSymNode",
            "ConstraintViolationError",
            "FailOnRecompileLimitHit",
            "TritonMissing",
            "UserError",
            "TraceError",
            "RuntimeError",
        ),
        means="The graph was captured and its backend failed on it, the backend does not exist, or `torch.export` "
        "met a branch on values, which cannot be exported.",
        fix="Run once without `torch.compile`, then with `backend='eager'` and `backend='aot_eager'`: the first "
        "that fails names the part. For export use `torch.cond` or `torch.where` in place of `if`. "
        "`torch._dynamo.list_backends()` lists what there is.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
        "torch._dynamo.exc.InvalidBackend: Invalid backend: 'tensorrt', see `torch._dynamo.list_backends()` for "
        "available backends.",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1385",
        title="TorchScript cannot compile or trace the model",
        family="environment",
        rank=68,
        patterns=(
            (
                r"\b(?:Python builtin|Unknown builtin op|undefined value|Expected a (?:value of type|default value "
                r"of type))\b[^\n]{0,200}"
            ),
            r"\bReturn value was annotated as having type\b",
            (
                r"\b(?:with statement|Type annotation|Compiled functions can't|builtin cannot be used as a value|"
                r"module/class/function cannot be)\b"
            ),
            (
                r"\bTracer cannot infer type of\b|\bTracing failed sanity checks\b|\bGraphs differed across "
                r"invocations\b|\bOnly (?:tensors|Tensors),? [^\n]{0,80} (?:from|as) traced\b"
            ),
            r"\bEncountering a dict at the output of the tracer\b",
            r"\btorch\.jit\.frontend\.\w+",
            r"\bThe following operation failed in the TorchScript interpreter\b",
            r"\bexpected a value of type '[^'\n]{1,80}' for argument '",
            r"\bCan't get source for <\w+ [^\n]{0,200}TorchScript requires source access",
        ),
        exceptions=(
            "RuntimeError",
            "NotSupportedError",
            "UnsupportedNodeError",
            "FrontendError",
            "FrontendTypeError",
            "TracingCheckError",
            "ValueError",
            "TypeError",
            "OSError",
        ),
        frames=(r"torch/jit/\w+\.py:",),
        only_exceptions=True,
        means="TorchScript knows a part of Python only: other libraries, open files, most of the built-in "
        "functions and dynamic types are outside of it; tracing takes tensors in and tensors out.",
        fix="Move such code out of the scripted module or mark it with `@torch.jit.ignore`; annotate arguments "
        "that are no tensors; return tensors. For new work use `torch.export` or `torch.compile`.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n  File '
        '".venv/lib/python3.11/site-packages/torch/jit/_script.py", line 1221, in _script_impl\nRuntimeError: \n'
        'Return value was annotated as having type int but is actually of type Tensor:\n  File "train.py", line '
        "6\ndef count(x: torch.Tensor) -> int:\n    return x\n    ~~~~~~~~ <--- HERE",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1394",
        title="no login for a tracking service or a hub",
        family="environment",
        rank=68,
        patterns=(
            r"\bapi_key not configured \(no-tty\)",
            r"\bAPI key must be (?:40|86) characters long",
            r"\bInvalid (?:user token|username or password)\b",
            r"\b401 Client Error: Unauthorized\b",
            r"\bToken is required \(`?token=True",
        ),
        means="The job has no key for the service, and no terminal at which it could be asked for.",
        fix="Export the key in the script of the job (`WANDB_API_KEY`, `HF_TOKEN`), log in once on that node, or "
        "go on without (`WANDB_MODE=offline`).",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
        "wandb.errors.errors.UsageError: api_key not configured (no-tty). call wandb.login(key=[your_api_key])",
        seen="text of wandb; not reproduced, it is an extra",
        also={
            "hub": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: "
            "https://huggingface.co/api/models/me/private",
        },
    ),
)
