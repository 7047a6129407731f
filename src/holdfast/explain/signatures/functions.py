"""Signatures of what people add to graphs: own functions, hooks, activation checkpoints, transforms, modules' fields.

Read through ``autograd``. Does not match anything.
"""

from __future__ import annotations

from holdfast.explain.signature import Signature

_SEEN = "reproduced on torch 2.13"

_OWN: tuple[Signature, ...] = (
    Signature(
        id="H1244",
        title="an own function returns a wrong number of gradients",
        family="autograd",
        patterns=(r"returned an incorrect number of gradients \(expected \d+, got \d+\)",),
        means="backward of a torch.autograd.Function must return one value for each argument of forward.",
        fix="Return None for arguments that need no gradient, such as numbers and flags.",
        example="RuntimeError: function ScaleBackward returned an incorrect number of gradients (expected 2, got 1)",
        seen=_SEEN,
    ),
    Signature(
        id="H1245",
        title="an own function returns a gradient of a wrong shape",
        family="autograd",
        patterns=(
            r"returned an invalid gradient at index \d+ - (?:got|expected)",
            r"\binvalid gradient at index \d+ - (?:got|expected)",
        ),
        means="Each gradient must have the shape, type and device of its argument: a forgotten transpose, or a "
        "missing sum over a dimension that was broadcast.",
        fix="Compare the two shapes in the message with the arguments of forward; test with gradcheck.",
        example="RuntimeError: Function ProductBackward returned an invalid gradient at index 1 - got [2, 4] but "
        "expected shape compatible with [4, 2]",
        seen=_SEEN,
        also={
            "torch 1.4": "RuntimeError: Function AddBackward0 returned an invalid gradient at index 1 - expected "
            "type torch.cuda.FloatTensor but got torch.FloatTensor",
        },
    ),
    Signature(
        id="H1246",
        title="an own function is written in an old way or lacks backward",
        family="autograd",
        patterns=(
            r"Legacy autograd function with non-static forward method is deprecated",
            r"You must implement (?:either )?the (?:backward|forward|jvp)",
        ),
        means="torch.autograd.Function needs static forward and backward methods, called by .apply.",
        fix="Add @staticmethod and a first argument ctx, and call Name.apply(x).",
        example="RuntimeError: Legacy autograd function with non-static forward method is deprecated. Please use "
        "new-style autograd function with static forward method. (Example: "
        "https://pytorch.org/docs/stable/autograd.html#torch.autograd.Function)",
        seen=_SEEN,
        also={
            "torch 1.5": "RuntimeError: Legacy autograd function with non-static forward method is deprecated. "
            "Please use new-style autograd function with static forward method. (Example: "
            "https://pytorch.org/docs/stable/autograd.html#torch.autograd.Function)",
        },
    ),
    Signature(
        id="H1266",
        title="something that is no tensor is saved for backward",
        family="autograd",
        patterns=(r"save_for_backward can only save variables, but argument \d+ is of type",),
        means="ctx.save_for_backward takes tensors only.",
        fix="Keep numbers and flags as fields: ctx.exponent = exponent.",
        example="TypeError: save_for_backward can only save variables, but argument 1 is of type int",
        seen=_SEEN,
    ),
    Signature(
        id="H1265",
        title="backward of an own function returns something that is no tensor",
        family="autograd",
        patterns=(r"expected (?:Tensor|Variable) or None \(got \w+\)",),
        means="Each value that backward of a torch.autograd.Function returns must be a tensor or None.",
        fix="Return tensors, and None for arguments without a gradient.",
        example="RuntimeError: expected Variable or None (got float)",
        seen=_SEEN,
    ),
    Signature(
        id="H1261",
        title="an operation cannot be differentiated twice",
        family="autograd",
        patterns=(
            r"trying to differentiate twice a function that was marked with @once_differentiable",
            r"Double backwards is not supported for CuDNN RNNs",
        ),
        means="A gradient penalty or another second derivative goes through an operation that has only a first one.",
        fix="Write backward of the own function with differentiable operations. For recurrent layers turn cuDNN off "
        "around them: with torch.backends.cudnn.flags(enabled=False).",
        example="RuntimeError: trying to differentiate twice a function that was marked with @once_differentiable",
        seen=_SEEN,
        also={
            "torch 1.7, cuDNN": "RuntimeError: Double backwards is not supported for CuDNN RNNs due to "
            "limitations in the CuDNN API. To run double backwards, please disable the CuDNN backend "
            "temporarily while running the forward pass of your RNN. For example: ",
        },
    ),
    Signature(
        id="H1253",
        title="a gradient hook changes the shape or type, or has nothing to hook on",
        family="autograd",
        patterns=(
            r"has changed the (?:size|type) of value",
            r"expected (?:Tensor|Variable)(?: or None)?, but hook returned",
            r"Backward hook returned an invalid number of grad_",
            r"cannot register a hook on a tensor that doesn't require gradient",
        ),
        means="A hook must return a gradient of the same shape and dtype, or None; and the tensor must require one.",
        fix="Return a tensor like the one given. Register the hook after requires_grad is set.",
        example="RuntimeError: hook '<lambda>' has changed the size of value",
        seen=_SEEN,
    ),
    Signature(
        id="H1254",
        title="an operation has no derivative",
        family="autograd",
        patterns=(
            r"derivative for (?:'[^'\n]{1,80}'|[\w:.]+) is not implemented",
            r"The function '\w+' is not differentiable with respect to argument",
        ),
        means="The operation cannot be differentiated by this argument: counting, bins, some special functions, or "
        "targets that require a gradient.",
        fix="detach() the argument if no gradient is meant. Else use a smooth replacement of the operation.",
        example="RuntimeError: The function 'nll_loss_forward' is not differentiable with respect to argument "
        "'weight'. This input cannot have requires_grad True.",
        seen=_SEEN,
        also={"torch 1.4": "RuntimeError: the derivative for 'target' is not implemented"},
    ),
    Signature(
        id="H1255",
        title="gradcheck found a wrong gradient",
        family="autograd",
        patterns=(
            r"Jacobian (?:mismatch|computed with forward mode mismatch) for output \d+ with respect to input \d+",
        ),
        means="The gradient differs from finite differences: a wrong backward, randomness, or single precision.",
        fix="Check with double inputs first. Then compare the two matrices in the message with the formula.",
        example="torch.autograd.gradcheck.GradcheckError: Jacobian mismatch for output 0 with respect to input 0,\n"
        "numerical:tensor([[6.6044, 0.0000, 0.0000, 0.0000],\n        [0.0000, 4.7179, 0.0000, "
        "0.0000],\n        [0.0000, 0.0000, 1.5298, 0.0000],\n        [0.0000, 0.0000, 0.0000, 9.1980]], "
        "dtype=torch.float64)\n"
        "analytical:tensor([[4.4030, 0.0000, 0.0000, 0.0000],\n        [0.0000, 3.1452, 0.0000, "
        "0.0000],\n        [0.0000, 0.0000, 1.0199, 0.0000],\n        [0.0000, 0.0000, 0.0000, 6.1320]], "
        "dtype=torch.float64)",
        seen=_SEEN,
    ),
)

_AROUND: tuple[Signature, ...] = (
    Signature(
        id="H1251",
        title="recomputation of an activation checkpoint differs from the first pass",
        family="autograd",
        patterns=(
            r"torch\.utils\.checkpoint: A different number of tensors was saved",
            r"torch\.utils\.checkpoint: Recomputed values for the following tensors\s+have different metadata",
            r"torch\.utils\.checkpoint: trying to save more tensors during\s+recomputation",
        ),
        means="The checkpointed part ran a second time in backward and did something else: it keeps state, fills a "
        "cache, branches on a counter, or runs under another autocast setting.",
        fix="Keep state changes out of the checkpointed part. debug=True prints both runs' operations.",
        example="torch.utils.checkpoint.CheckpointError: torch.utils.checkpoint: Recomputed values for the following "
        "tensors have different metadata than during the forward pass.\n"
        "tensor at position 0:\n"
        "saved metadata: {'shape': torch.Size([2, 4]), 'dtype': torch.float32, 'device': "
        "device(type='cpu')}\n"
        "recomputed metadata: {'shape': torch.Size([4, 4]), 'dtype': torch.float32, 'device': "
        "device(type='cpu')}\n"
        "tensor at position 1:\n"
        "saved metadata: {'shape': torch.Size([2, 4]), 'dtype': torch.float32, 'device': "
        "device(type='cpu')}\n"
        "recomputed metadata: {'shape': torch.Size([4, 4]), 'dtype': torch.float32, 'device': "
        "device(type='cpu')}\n"
        ".",
        seen=_SEEN,
    ),
    Signature(
        id="H1252",
        title="a reentrant activation checkpoint is used where it cannot be",
        family="autograd",
        patterns=(
            r"torch\.utils\.checkpoint is incompatible\s+with \.grad\(\)",
            r"Checkpointing is not compatible with \.grad\(\)",
            r"none of output has requires_grad=True,\s+this checkpoint\(\) is not necessary",
        ),
        means="The old form of checkpoint works with loss.backward() only, and needs an input that requires grad.",
        fix="Pass use_reentrant=False.",
        example="RuntimeError: When use_reentrant=True, torch.utils.checkpoint is incompatible with .grad() or "
        "passing an `inputs` parameter to .backward(). To resolve this error, you can either set "
        "use_reentrant=False, or call .backward() without passing the `inputs` argument.",
        seen=_SEEN,
        also={
            "torch 1.11": "RuntimeError: Checkpointing is not compatible with .grad() or when an `inputs` parameter "
            "is passed to .backward(). Please use .backward() and do not pass its `inputs` argument.",
        },
    ),
    Signature(
        id="H1257",
        title="a function under vmap or torch.func does what these cannot follow",
        family="autograd",
        patterns=(
            r"vmap: It looks like you're (?:either )?(?:\(1\) )?calling",
            r"vmap: It looks like you're attempting to use a Tensor in some data-dependent control flow",
            r"vmap: called random operation while in randomness error mode",
            r"vmap: inplace arithmetic\(self, \*extra_args\) is not possible",
            r"\bvmap(?:\(.{1,200}\))?: (?:Expected|We do not|Got|The)",
            r"\bvmap\(.{1,200}\): .{0,100}must only return Tensors",
            r"\(f, ?\*primals\): expected|\(f\)\(\*args\): Expected",
            r"Cannot access data pointer of Tensor that doesn't have storage",
            r"inside of a function being transformed",
            r"called inside a functorch transform",
        ),
        means="Under vmap, grad and jacrev a function must be pure: no item(), no branch on a value, no unplanned "
        "randomness, no backward() or requires_grad_() within.",
        fix="Use torch.where instead of if, vmap(..., randomness='different') for dropout, and torch.func.grad for "
        "inner gradients.",
        example="RuntimeError: vmap: It looks like you're calling .item() on a Tensor. We don't support vmap "
        "over calling .item() on a Tensor, please try to rewrite what you're doing with other "
        "operations. If error is occurring somewhere inside PyTorch internals, please file a bug report.",
        seen=_SEEN,
        also={
            "torch 2.0": "RuntimeError: vmap: It looks like you're either (1) calling .item() on a Tensor or (2) "
            "attempting to use a Tensor in some data-dependent control flow or (3) encountering this error in "
            "PyTorch internals.",
        },
    ),
    Signature(
        id="H1259",
        title="something that is no parameter is assigned as one",
        family="autograd",
        patterns=(
            r"cannot assign '[\w.]+' (?:object )?(?:as|to) parameter '\w+' \(torch\.nn\.Parameter or None",
            r"Cannot assign non-leaf Tensor to parameter",
            r"cannot assign '[\w.]+' (?:object )?(?:as|to) buffer '\w+' \(",
        ),
        means="The name belongs to a Parameter of the module; a computed tensor, a plain tensor or a number cannot "
        "take its place.",
        fix="Wrap it, torch.nn.Parameter(value), or write under no_grad: layer.weight.copy_(value). For a tied or "
        "computed weight use torch.nn.utils.parametrize.",
        example="TypeError: cannot assign 'torch.FloatTensor' as parameter 'weight' (torch.nn.Parameter or None "
        "expected)",
        seen=_SEEN,
    ),
    Signature(
        id="H1260",
        title="a module is filled before super().__init__()",
        family="user code",
        patterns=(
            r"cannot assign (?:module|parameter|buffer)s? before Module\.__init__\(\) call",
            r"has no attribute '_(?:modules|parameters|buffers|backward_hooks|forward_hooks|forward_pre_hooks)'",
            r"has no attribute '_(?:state_dict_(?:pre_)?hooks|backward_pre_hooks|non_persistent_buffers_set)'",
        ),
        means="torch.nn.Module.__init__ has not run yet when a layer, parameter or buffer is assigned.",
        fix="Make super().__init__() the first line of __init__.",
        example="AttributeError: cannot assign module before Module.__init__() call",
        seen=_SEEN,
    ),
    Signature(
        id="H1267",
        title="torch.compile cannot capture the whole function",
        family="user code",
        rank=72,
        exceptions=("Unsupported",),
        patterns=(
            r"Developer debug context:",
            r"For more details about this graph break",
            r"Dynamo does not know how to trace",
            r"Unsupported (?:Tensor\.item\(\) call|context manager|function call)",
        ),
        only_exceptions=True,
        means="With fullgraph=True everything must be traced. Values taken out of tensors, branches on them, files "
        "and prints break the graph.",
        fix="Drop fullgraph=True, or move that line out of it; torch._dynamo.explain lists the breaks.",
        example="Traceback (most recent call last):\n  File "
        '"/venv/lib/python3.11/site-packages/torch/_dynamo/eval_frame.py", line 1177, in '
        "compile_wrapper\n"
        "Unsupported: Failed to trace builtin operator\n  Explanation: Dynamo does not know how to trace "
        "builtin operator `open` with argument types ['str', 'str'] (has_kwargs False)\n  Hint: Avoid "
        "calling builtin `open` with argument types ['str', 'str']. Consider using an equivalent "
        "alternative function/method to `open`.\n  Hint: If you are attempting to call a logging "
        "function (e.g. `print`), you can try adding it to "
        "`torch._dynamo.config.reorderable_logging_functions`.\n  Hint: Please report an issue to "
        "PyTorch.\n\n  Developer debug context: builtin open [<class "
        "'torch._dynamo.variables.constant.ConstantVariable'>, <class "
        "'torch._dynamo.variables.constant.ConstantVariable'>] False\n\n For more details about this grap",
        seen=_SEEN,
    ),
    Signature(
        id="H1268",
        title="torch.compile finds no C++ compiler",
        family="environment",
        rank=45,
        patterns=(r"No working C\+\+ compiler found", r"InvalidCxxCompiler", r"Failed to find C compiler"),
        means="Inductor and Triton compile kernels on the spot, and no compiler is installed or on PATH.",
        fix="Install g++ (build-essential), or set CC and CXX. Without one use backend='eager' or no compile.",
        example="torch._inductor.exc.InductorError: InvalidCxxCompiler: No working C++ compiler found in "
        "torch._inductor.config.cpp.cxx: (None, 'g++')",
        seen=_SEEN,
        also={
            "triton": "RuntimeError: Failed to find C compiler. Please specify via CC environment variable.",
        },
    ),
)

SIGNATURES: tuple[Signature, ...] = (*_OWN, *_AROUND)
"""Every signature of what is added to graphs."""
