"""Signatures of graphs: in-place changes, graphs used twice, tensors cut off from them, losses that are no scalar.

Own functions, hooks, transforms and modules' fields lie in ``functions``. Does not match anything.
"""

from __future__ import annotations

from holdfast.explain.signature import Signature
from holdfast.explain.signatures.functions import SIGNATURES as _FUNCTIONS

_SEEN = "reproduced on torch 2.13"

_USE: tuple[Signature, ...] = (
    Signature(
        id="H948",
        title="a tensor that backward needs was changed in place",
        family="autograd",
        patterns=(r"has been modified by an inplace operation",),
        means="Backward needs a value as it was in the forward pass, and it was overwritten: by +=, an in-place "
        "ReLU or a write to a slice, or by optimizer.step() between the forward pass and its backward.",
        fix="Run once under torch.autograd.detect_anomaly(): the first traceback names the forward line. Write "
        "x = x + y, clone() before writing, or move step() after the last backward.",
        example="RuntimeError: one of the variables needed for gradient computation has been modified by an "
        "inplace operation: [torch.FloatTensor [8, 4]], which is output 0 of Sigmoid, is at version 1; "
        "expected version 0 instead. Hint: enable anomaly detection to find the operation that failed to "
        "compute its gradient, with torch.autograd.set_detect_anomaly(True, check_nan=False).",
        seen=_SEEN + "; pytorch#15803",
        also={
            "torch 1.0": "RuntimeError: one of the variables needed for gradient computation has been modified by an "
            "inplace operation",
        },
    ),
    Signature(
        id="H949",
        title="a graph is used a second time after it was freed",
        family="autograd",
        patterns=(
            r"Trying to backward through the graph a second time",
            r"directly access saved (?:tensors|variables) after they have already been freed",
        ),
        means="backward() frees what the graph saved, and a part of it is used again: a recurrent state carried to "
        "the next batch, a loss summed over steps, a term computed before the loop, or two losses over one encoder.",
        fix="detach() what is carried on, compute shared terms anew in each step, and add losses before one "
        "backward(). retain_graph=True only if two backwards over one forward are really meant.",
        example="RuntimeError: Trying to backward through the graph a second time (or directly access saved "
        "tensors after they have already been freed). Saved intermediate values of the graph are freed "
        "when you call .backward() or autograd.grad(). Specify retain_graph=True if you need to backward "
        "through the graph a second time or if you need to access saved tensors after calling backward.",
        seen=_SEEN,
        also={
            "torch 1.4": "RuntimeError: Trying to backward through the graph a second time, but the buffers have "
            "already been freed. Specify retain_graph=True when calling backward the first time.",
        },
    ),
    Signature(
        id="H950",
        title="the loss does not depend on any parameter that is trained",
        family="autograd",
        patterns=(
            r"does not require grad and does not have a grad_fn",
            r"element \d+ of (?:variables|tensors) does not require grad",
        ),
        means="There is no graph behind the loss: all parameters are frozen, gradients are switched off, or the way "
        "from them is cut by detach(), item(), argmax(), numpy() or a new torch.tensor(...).",
        fix="Print loss.grad_fn and go back to the first tensor without one. Check requires_grad of the "
        "parameters, and no_grad, inference_mode and set_grad_enabled around the forward pass.",
        example="RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn",
        seen=_SEEN,
        also={
            "torch 0.4": "RuntimeError: element 0 of variables does not require grad and does not have a grad_fn",
        },
    ),
    Signature(
        id="H951",
        title="backward of a loss that is no scalar",
        family="autograd",
        patterns=(r"grad can be implicitly created only for scalar outputs",),
        means="The loss has one value for each sample or element.",
        fix="Take loss.mean() or sum(), or drop reduction='none'.",
        example="RuntimeError: grad can be implicitly created only for scalar outputs",
        seen=_SEEN,
    ),
    Signature(
        id="H1263",
        title="backward of a complex loss",
        family="autograd",
        patterns=(r"grad can be (?:implicitly )?(?:created|computed) only for real scalar outputs",),
        means="The loss is a complex number, mostly after an FFT, and only a real one can be made smaller.",
        fix="Take the loss of abs(), of the squared magnitude, or of torch.view_as_real(...).",
        example="RuntimeError: grad can be implicitly created only for real scalar outputs but got torch.complex64",
        seen=_SEEN,
    ),
    Signature(
        id="H1264",
        title="backward of something that is no tensor",
        family="autograd",
        patterns=(
            r"'(?:float|int|bool|tuple|list|dict|NoneType|str|method|function)' object has no attribute 'backward'",
            r"'(?:numpy\.\w+|ndarray|float\d+|\w*Loss|\w*Output)' object has no attribute 'backward'",
        ),
        means="The loss was turned into a number by .item(), is a tuple of losses or a model's output as a whole, or "
        "is the 0 that a sum over nothing begins with.",
        fix="Sum the tensors themselves and take .item() only for the log; pick the loss out of the tuple.",
        example="AttributeError: 'float' object has no attribute 'backward'",
        seen=_SEEN,
    ),
    Signature(
        id="H955",
        title="graphs are kept from step to step, so that memory grows",
        family="out of memory",
        role="confirmation",
        rank=80,
        patterns=(
            r"Using backward\(\) with create_graph=True will create a reference cycle",
            r"Converting a tensor with requires_grad=True to a scalar may lead to unexpected behavior",
        ),
        means="A loss kept with its graph holds all activations of its step, and backward(create_graph=True) makes a "
        "cycle that is freed late. Memory then grows with each step until it runs out.",
        fix="Keep loss.item() or loss.detach(). For second derivatives use torch.autograd.grad(create_graph=True).",
        false_positives="Both texts are warnings; they prove nothing as long as memory does not grow.",
        example="/venv/lib/python3.11/site-packages/torch/autograd/graph.py:979: UserWarning: Using backward() with "
        "create_graph=True will create a reference cycle between the parameter and its gradient which can cause a "
        "memory leak.",
        seen=_SEEN + ", warnings only; lepard#12",
    ),
)

_TENSORS: tuple[Signature, ...] = (
    Signature(
        id="H952",
        title="a parameter is changed in place outside no_grad",
        family="autograd",
        patterns=(
            r"a (?:view of a )?leaf Variable that requires grad (?:is being|has been) used in an in-place operation",
            r"leaf variable has been moved into the graph interior",
        ),
        means="A tensor with requires_grad=True is written to while autograd records: own weight updates, "
        "initialisation, clamping of weights.",
        fix="Put the write under `with torch.no_grad():`, or use torch.nn.init.",
        example="RuntimeError: a leaf Variable that requires grad is being used in an in-place operation.",
        seen=_SEEN,
        also={
            "torch 1.4": "RuntimeError: a leaf Variable that requires grad has been used in an in-place operation.",
            "torch 1.4, a view": "RuntimeError: leaf variable has been moved into the graph interior",
        },
    ),
    Signature(
        id="H953",
        title="a tensor of the graph is turned into a NumPy array",
        family="autograd",
        patterns=(r"Can't call numpy\(\) on (?:Tensor|Variable) that requires grad",),
        means="NumPy knows no gradients: metrics, plots and np.array(...) need a tensor without graph.",
        fix="Write tensor.detach().cpu().numpy(), or compute metrics under torch.no_grad().",
        example="RuntimeError: Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.",
        seen=_SEEN,
        also={
            "torch 0.4": "RuntimeError: Can't call numpy() on Variable that requires grad. Use var.detach().numpy() "
            "instead.",
        },
    ),
    Signature(
        id="H954",
        title="a tensor of the graph is copied by deepcopy",
        family="autograd",
        patterns=(
            r"Only (?:Tensors|Variables) created explicitly by the user \(graph leaves\) support the deepcopy",
        ),
        means="deepcopy of a module or dict met a tensor that was computed: features kept on self, a loss, or a "
        "weight of weight_norm.",
        fix="Keep only detached tensors on modules, and copy models before the first forward pass or by state_dict. "
        "For weight_norm use torch.nn.utils.parametrizations.",
        example="RuntimeError: Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
        "protocol at the moment.  If you were attempting to deepcopy a module, this may be because of a "
        "torch.nn.utils.weight_norm usage, see https://github.com/pytorch/pytorch/pull/103001",
        seen=_SEEN,
        also={
            "torch 1.0": "RuntimeError: Only Tensors created explicitly by the user (graph leaves) support the "
            "deepcopy protocol at the moment",
        },
    ),
    Signature(
        id="H1241",
        title="a tensor asked for its gradient is not in the graph",
        family="autograd",
        patterns=(
            r"One of the differentiated Tensors appears to not have been used in the graph",
            r"The differentiated Tensor at index \d+ appears to not have been used in the graph",
        ),
        means="torch.autograd.grad was given a tensor that the output does not depend on: a layer that this batch "
        "does not use, or a copy of the input.",
        fix="If that is meant pass allow_unused=True and handle None. Else differentiate by the very tensor that "
        "went into the model.",
        example="RuntimeError: The differentiated Tensor at index 2 appears to not have been used in the graph. "
        "Set allow_unused=True if this is the desired behavior.",
        seen=_SEEN,
        also={
            "torch 1.8": "RuntimeError: One of the differentiated Tensors appears to not have been used in the "
            "graph. Set allow_unused=True if this is the desired behavior.",
        },
    ),
    Signature(
        id="H1242",
        title="a tensor asked for its gradient does not require one",
        family="autograd",
        patterns=(
            r"One of the differentiated Tensors does not require grad",
            r"The differentiated Tensor at index \d+ does not require grad",
        ),
        means="torch.autograd.grad was given a tensor with requires_grad=False, mostly the input of a gradient "
        "penalty.",
        fix="Call x.requires_grad_() before the forward pass.",
        example="RuntimeError: One of the differentiated Tensors does not require grad",
        seen=_SEEN,
        also={"torch 1.8": "RuntimeError: One of the differentiated Tensors does not require grad"},
    ),
    Signature(
        id="H1243",
        title="the gradient given to backward has another shape than the output",
        family="autograd",
        patterns=(r"Mismatch in shape: grad_output\[\d+\] has a shape of",),
        means="backward(gradient) and grad_outputs need the shape of the output, not of the input.",
        fix="Pass torch.ones_like(output), or reduce the output to a scalar.",
        example="RuntimeError: Mismatch in shape: grad_output[0] has a shape of torch.Size([3]) and output[0] "
        "has a shape of torch.Size([3, 2]).",
        seen=_SEEN,
    ),
    Signature(
        id="H1247",
        title="integers cannot have gradients",
        family="autograd",
        patterns=(r"only Tensors of floating point (?:and complex )?dtype can require gradients",),
        means="requires_grad or Parameter was used on integers or booleans: indices, counts, masks.",
        fix="Convert to float if they are to be trained; else register_buffer, or Parameter(requires_grad=False).",
        example="RuntimeError: Only Tensors of floating point and complex dtype can require gradients",
        seen=_SEEN,
        also={
            "torch 1.3": "RuntimeError: Only Tensors of floating point dtype can require gradients",
        },
    ),
    Signature(
        id="H1248",
        title="requires_grad of a computed tensor cannot be changed",
        family="autograd",
        patterns=(r"you can only change requires_grad flags of leaf variables",),
        means="The tensor came out of operations, so it belongs to a graph.",
        fix="Use y = x.detach() to cut the graph there; freeze layers by their parameters instead.",
        example="RuntimeError: you can only change requires_grad flags of leaf variables. If you want to use a "
        "computed variable in a subgraph that doesn't require differentiation use var_no_grad = "
        "var.detach().",
        seen=_SEEN,
    ),
    Signature(
        id="H1249",
        title="a tensor made in inference mode is used for training",
        family="autograd",
        patterns=(
            r"Inference tensors cannot be saved for backward",
            r"Inplace update to inference tensor outside InferenceMode is not allowed",
            r"Setting requires_grad=True on inference tensor outside InferenceMode is not allowed",
            r"Inference tensors do not track version counter|Cannot set version_counter for inference tensor",
        ),
        means="Tensors made under torch.inference_mode() can never be part of a graph: features, statistics or "
        "buffers that were computed in evaluation.",
        fix="Use torch.no_grad() for what is trained on later, or clone() outside of inference mode.",
        example="RuntimeError: Inference tensors cannot be saved for backward. Please do not use Tensors created "
        "in inference mode in computation tracked by autograd. To work around this, you can make a clone "
        "to get a normal tensor and use it in autograd, or use `torch.no_grad()` instead of "
        "`torch.inference_mode()`.",
        seen=_SEEN,
    ),
    Signature(
        id="H1250",
        title="one of several views is changed in place",
        family="autograd",
        patterns=(
            r"is a view and is being modified inplace",
            r"Can't detach views in-place",
            r"A view was created in (?:no_grad|inference) mode and",
        ),
        means="unbind, chunk, split and views made under no_grad must not be written to: autograd cannot follow it.",
        fix="Replace the in-place operation (x = x + y instead of x += y), or clone() the part first.",
        example="RuntimeError: Output 0 of Unbind is a view and is being modified inplace. This view is the "
        "output of a function that returns multiple views. Such functions do not allow the output views "
        "to be modified inplace. You should replace the inplace operation by an out-of-place one.",
        seen=_SEEN,
    ),
    Signature(
        id="H1256",
        title="a gradient is None",
        family="autograd",
        rank=79,
        only_exceptions=True,
        exceptions=("AttributeError",),
        patterns=(
            r"'NoneType' object has no attribute '(?:norm|zero_|div_|mul_|clamp_|detach_|add_|abs|copy_|data)'",
            r"'NoneType' object has no attribute '(?:clone|isnan|isfinite|pow|square|flatten|sum|mean|cpu|detach)'",
        ),
        means="parameter.grad is None where no backward has reached: an unused layer, before the first backward, "
        "after zero_grad, or a tensor that is no leaf (made by .to(), .double() or an operation).",
        fix="Skip parameters whose grad is None. If there should be one, check that the tensor is a leaf that "
        "requires grad and is used.",
        false_positives="Another object that should be a tensor is None, such as a function without return.",
        example='Traceback (most recent call last):\n  File "/app/train.py", line 658, in <listcomp>\n'
        "AttributeError: 'NoneType' object has no attribute 'norm'",
        seen=_SEEN,
    ),
    Signature(
        id="H1258",
        title="a gradient of another shape or type is assigned",
        family="autograd",
        patterns=(
            r"attempting to assign a gradient (?:of size|with dtype|with device|with layout)",
            r"assigned grad has data of a different (?:size|type|device|layout)",
        ),
        means="parameter.grad must have the shape, dtype and device of the parameter.",
        fix="Convert it: parameter.grad = value.reshape_as(parameter).to(parameter).",
        example="RuntimeError: attempting to assign a gradient of size '[4, 2]' to a tensor of size '[2, 4]'. "
        "Please ensure that the gradient and the tensor are the same size",
        seen=_SEEN,
        also={"torch 1.8": "RuntimeError: assigned grad has data of a different size"},
    ),
    Signature(
        id="H1262",
        title="retain_grad of a tensor without gradient",
        family="autograd",
        patterns=(r"can't retain_grad on Tensor that has requires_grad=False",),
        means="The tensor depends on nothing that requires a gradient.",
        fix="Set requires_grad on the input or the layers before, and do not call it under no_grad.",
        example="RuntimeError: can't retain_grad on Tensor that has requires_grad=False",
        seen=_SEEN,
    ),
)

SIGNATURES: tuple[Signature, ...] = (*_USE, *_TENSORS, *_FUNCTIONS)
"""Every signature of graphs."""
