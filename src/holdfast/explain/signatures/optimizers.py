"""Signatures of optimizers and schedules: what they were given, and states that belong to another model."""

from __future__ import annotations

from holdfast.explain.signature import Signature

SIGNATURES: tuple[Signature, ...] = (
    Signature(
        id="H975",
        title="wrong parameters for an optimizer: none, no leaves, or some twice",
        family="user code",
        patterns=(
            r"\boptimizer got an empty parameter list\b",
            r"\bcan't optimize a non-leaf Tensor\b",
            r"\bsome parameters appear in more than one parameter group\b",
            r"\boptimizer contains a parameter group with duplicate parameters\b",
        ),
        means="The list of parameters is empty (layers in a plain Python list, everything frozen), holds a result "
        "of a computation rather than a parameter, or names one parameter in two groups.",
        fix="Put layers into `nn.ModuleList`; make the tensor first and the `nn.Parameter` last "
        "(`nn.Parameter(torch.randn(3) * 0.1)`); take the parameters of the second group out of the first.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n  File '
        '".venv/lib/python3.11/site-packages/torch/optim/optimizer.py", line 400, in __init__\nValueError: '
        "optimizer got an empty parameter list",
        seen="reproduced on torch 2.13",
        also={
            "not a leaf": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "ValueError: can't optimize a non-leaf Tensor",
        },
    ),
    Signature(
        id="H976",
        title="the saved state of the optimizer is of another model",
        family="checkpoint",
        rank=60,
        patterns=(
            r"\bloaded state dict contains a parameter group that doesn't match the size of optimizer's group\b",
            r"\bloaded state dict has a different number of parameter groups\b",
        ),
        means="The optimizer that is resumed has other groups, or other numbers of parameters in them, than the "
        "one that was saved: layers were added or frozen since, or groups are built differently.",
        fix="Build model, freezing and groups as when it was saved, then load. If the model changed on purpose, "
        "load only the weights and start the optimizer anew with a short warm-up.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n  File '
        '".venv/lib/python3.11/site-packages/torch/optim/optimizer.py", line 950, in load_state_dict\n'
        "ValueError: loaded state dict contains a parameter group that doesn't match the size of optimizer's group",
        seen="reproduced on torch 2.13",
        also={
            "groups": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nValueError: '
            "loaded state dict has a different number of parameter groups",
        },
    ),
    Signature(
        id="H986",
        title="a schedule resumed with an optimizer that was not",
        family="checkpoint",
        rank=60,
        patterns=(
            r"\bparam 'initial_lr' is not specified in param_groups\[\d+\] when resuming (?:an optimizer|scheduler)",
        ),
        means="A schedule with `last_epoch` looks for the first learning rate in the optimizer, which has it only "
        "after its own state was loaded.",
        fix="Load the state of the optimizer before the schedule is made; or make the schedule without "
        "`last_epoch` and then call `scheduler.load_state_dict`.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nKeyError: "param '
        "'initial_lr' is not specified in param_groups[0] when resuming scheduler with last_epoch >= 0.\\nThis "
        "typically happens when:\\n1. You're trying to resume training from a checkpoint but haven't properly "
        'loaded the optimizer state"',
        seen="reproduced on torch 2.13",
        also={
            "torch 1.8": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nKeyError: '
            "\"param 'initial_lr' is not specified in param_groups[0] when resuming an optimizer\"",
        },
    ),
    Signature(
        id="H987",
        title="OneCycleLR stepped beyond its end",
        family="user code",
        patterns=(r"\bTried to step \d+ times\. The specified number of total steps is \d+",),
        means="The schedule was made for fewer steps than the training takes: counted in epochs but stepped in "
        "batches, or resumed with the number of the first run.",
        fix="Pass `total_steps=epochs * len(loader)` (divided by the accumulation steps). To train longer after a "
        "resume make a new schedule rather than loading the old one, whose state holds the old total.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nValueError: Tried '
        "to step 11 times. The specified number of total steps is 10",
        seen="reproduced on torch 2.13",
        also={
            "torch 1.8": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "ValueError: Tried to step 1002 times. The specified number of total steps is 1000",
        },
    ),
    Signature(
        id="H1320",
        title="a setting of an optimizer has a value that it cannot have",
        family="user code",
        rank=84,
        patterns=(
            (
                r"\bInvalid (?:learning rate|lr|epsilon value|eps|beta parameter|beta parameters|weight_decay "
                r"value|momentum value|rho value|alpha value|lr_decay value|initial_accumulator_value value|"
                r"max_iter|etas|step sizes)\b"
            ),
            r"\bNesterov momentum requires a momentum and zero dampening\b",
            r"'(?:<=|<|>|>=)' not supported between instances of '(?:float|int|str)' and '(?:float|int|str)'",
            r"\bTensor (?:lr|betas\[\d\]) must be 1-element\b",
        ),
        exceptions=("ValueError", "TypeError"),
        frames=(r"torch/optim/\w+\.py:",),
        only_exceptions=True,
        means="A learning rate, beta, momentum or weight decay is negative, too large, or text: YAML reads `1e-3` "
        "as text, `1.0e-3` as a number.",
        fix="Print the settings with their types before use. In YAML write `1.0e-3`, or convert with `float(...)`; "
        "check the sign and the scale that a sweep draws from.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n  File '
        '".venv/lib/python3.11/site-packages/torch/optim/adam.py", line 59, in __init__\nValueError: Invalid '
        "learning rate: -30.0",
        seen="reproduced on torch 2.13",
        also={
            "text": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n  File '
            "\".venv/lib/python3.11/site-packages/torch/optim/sgd.py\", line 45, in __init__\nTypeError: '<=' not "
            "supported between instances of 'float' and 'str'",
        },
    ),
    Signature(
        id="H1321",
        title="an optimizer or a schedule was given the wrong kind of object",
        family="user code",
        patterns=(
            r"\bparams argument given to the optimizer should be an iterable of Tensors or dicts\b",
            r"\boptimizer can only optimize Tensors, but one of the params is\b",
            r"\b\w+ is not an Optimizer\b",
            r"\bparam_group must be a dict\b",
            r"\bLBFGS doesn't support per-parameter options\b",
            r"\boptimizer parameters need to be organized in ordered collections\b",
            r"\bparameter group didn't specify a value of required optimization parameter\b",
            r"\ball optimizer param(?:s| groups) should be with/without names\b",
        ),
        exceptions=("TypeError", "ValueError"),
        means="An optimizer takes an iterable of parameters, or of dicts with the key `params`; a schedule takes "
        "an optimizer. It got one tensor, modules, names or a model.",
        fix="Pass `model.parameters()`, or `[{'params': part.parameters(), 'lr': 1e-4}, ...]`; pass the optimizer "
        "itself to the schedule, not a wrapper of it.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nTypeError: '
        "optimizer can only optimize Tensors, but one of the params is torch.nn.modules.linear.Linear",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1322",
        title="step() called without what it needs: a closure or a metric",
        family="user code",
        patterns=(r"\bstep\(\) missing 1 required positional argument: '(?:closure|metrics?)'",),
        means="`LBFGS` evaluates the loss several times and needs a closure; `ReduceLROnPlateau` needs the metric "
        "that it watches.",
        fix="`optimizer.step(closure)` with a closure that clears gradients, computes the loss, calls backward and "
        "returns it; `scheduler.step(validation_loss)` once after each validation.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nTypeError: '
        "ReduceLROnPlateau.step() missing 1 required positional argument: 'metrics'",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1323",
        title="a schedule of learning rates with arguments that do not fit together",
        family="user code",
        patterns=(
            r"\bYou must define either total_steps OR \(epochs AND steps_per_epoch\)",
            r"\bExpected positive integer (?:total_steps|epochs|steps_per_epoch|T_0), but got\b",
            (
                r"\bExpected (?:integer T_mult >= 1|float between 0 and 1 pct_start|non-negative epoch|float or "
                r"int eta_min), but got\b"
            ),
            r"\b[Ee]xpected \d+ (?:lr_lambdas|min_lrs?|lambdas), (?:but )?got \d+",
            r"\bSequential Schedulers expects number of schedulers\b",
            r"\b(?:mode|threshold mode) \w+ is unknown!",
            r"\boptimizer must support momentum or beta1 with `cycle_momentum` option enabled\b",
            r"\b\w+ must have the same length as optimizer\.param_groups\b",
            r"\bFactor should be < 1\.0\b|\bmultiplicative factor expected to be\b",
            r"\bexpects (?:all schedulers to belong to the same optimizer|at least one scheduler)\b",
            r"\bThe number of param groups in the `optimizer` \(\d+\) differs from when\b",
        ),
        exceptions=("ValueError", "TypeError"),
        means="The length of a schedule is missing or 0 (an empty loader), a list has another length than the "
        "parameter groups, or an option does not exist for this optimizer.",
        fix="Print `len(loader)` and `len(optimizer.param_groups)`. OneCycleLR needs `total_steps`, or `epochs` "
        "with `steps_per_epoch`; SequentialLR one milestone fewer than schedules; CyclicLR `cycle_momentum=False` "
        "with optimizers without momentum.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nValueError: You '
        "must define either total_steps OR (epochs AND steps_per_epoch)",
        seen="reproduced on torch 2.13",
        also={
            "lambdas": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nValueError: '
            "Expected 2 lr_lambdas, but got 1",
        },
    ),
    Signature(
        id="H1324",
        title="sparse gradients for an optimizer that takes none, or the reverse",
        family="user code",
        patterns=(
            r"\b\w+ does not support sparse gradients\b",
            r"\bsparse gradients? (?:is|are) not supported\b",
            r"\bSparseAdam (?:does not support|requires) dense (?:parameter )?[\w ]*gradients\b",
        ),
        means="`nn.Embedding(sparse=True)` makes sparse gradients, which only SGD, Adagrad and SparseAdam take; "
        "SparseAdam in turn takes no dense ones.",
        fix="Drop `sparse=True` (the simplest), or give the table an optimizer of its own: SparseAdam for it, Adam "
        "for the rest.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nRuntimeError: Adam '
        "does not support sparse gradients, please consider SparseAdam instead",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1325",
        title="options of an optimizer that exclude each other: fused, foreach, capturable",
        family="user code",
        patterns=(
            r"`fused` and `foreach` cannot be `True` together",
            r"`fused` does not support `(?:differentiable|foreach)`",
            r"`fused=True` requires all the params to be floating point Tensors of supported devices",
            r"\b(?:lr|betas\[\d\]) as a Tensor is not supported for capturable=False and foreach=True",
            r"\bIf capturable=\w+, params and (?:state_)?\w+ must be\b",
        ),
        means="The fast versions of a step take only some combinations: one of `fused` and `foreach`, "
        "floating-point parameters on devices that have the kernel.",
        fix="Leave the options out: torch then chooses. Pass `fused=True` alone, after the model is on its device.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nRuntimeError: '
        "`fused` and `foreach` cannot be `True` together.",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1327",
        title="the state of the optimizer has other sizes than the parameters",
        family="checkpoint",
        rank=66,
        patterns=(
            r"\bThe size of tensor a \(\d+\) must match the size of tensor b \(\d+\)",
            r"\boutput with shape \[[\d, ]*\] doesn't match the broadcast shape",
        ),
        exceptions=("RuntimeError",),
        frames=(r"torch/optim/(?!swa_utils|lr_scheduler)\w+\.py:(?:step|_single_tensor_\w+|_multi_tensor_\w+|\w+)$",),
        only_exceptions=True,
        means="Moments or momentum were loaded or kept from parameters of another shape: the number of parameters "
        "is the same, so loading did not notice. A layer was replaced or resized.",
        fix="Make a new optimizer after the model was changed, or drop the entries of the changed parameters from "
        "`state_dict()['state']` before loading.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n  File '
        '".venv/lib/python3.11/site-packages/torch/optim/optimizer.py", line 526, in wrapper\n  File '
        '".venv/lib/python3.11/site-packages/torch/optim/adam.py", line 247, in step\n  File '
        '".venv/lib/python3.11/site-packages/torch/optim/adam.py", line 424, in _single_tensor_adam\n'
        "RuntimeError: The size of tensor a (8) must match the size of tensor b (16) at non-singleton dimension 0",
        seen="reproduced on torch 2.13",
    ),
)
