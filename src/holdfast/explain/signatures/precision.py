"""Signatures of precision: loss scaling, and number types that are too small or of the wrong kind.

NaN where none may be, random draws and determinism lie in ``nonfinite``. Does not match anything.
"""

from __future__ import annotations

from holdfast.explain.signature import Signature
from holdfast.explain.signatures.nonfinite import SIGNATURES as _NONFINITE

_SEEN = "reproduced on torch 2.13"

_SCALING: tuple[Signature, ...] = (
    Signature(
        id="H956",
        title="the loss scaler steps an optimizer that got no gradients",
        family="numerics",
        patterns=(r"No inf checks were recorded (?:for this optimizer|prior to update)",),
        means="GradScaler.step or update found no gradient from a scaled loss: backward was skipped, the gradients "
        "were cleared before, or the optimizer holds other parameters than the loss.",
        fix="Call scaler.scale(loss).backward() before each scaler.step(). Skip both for an empty batch. Check that "
        "the optimizer was given the parameters of this model.",
        example="AssertionError: No inf checks were recorded for this optimizer.",
        seen=_SEEN,
    ),
    Signature(
        id="H957",
        title="gradients are unscaled twice before an update",
        family="numerics",
        patterns=(r"unscale_\(\) has already been called on this optimizer since the last update\(\)",),
        means="scaler.unscale_ may be called once for each optimizer and update: not in every micro-step, nor once "
        "for each group that is clipped.",
        fix="Call it once, right before clipping, in the micro-step that steps.",
        example="RuntimeError: unscale_() has already been called on this optimizer since the last update().",
        seen=_SEEN,
    ),
    Signature(
        id="H958",
        title="a loss scaler is used with float16 parameters",
        family="numerics",
        patterns=(r"Attempting to unscale FP16 gradients",),
        means="GradScaler needs float32 parameters. The model, or a part of it, was converted with .half() or loaded "
        "in float16.",
        fix="Keep the parameters in float32 and use autocast; or train in bfloat16 without a scaler.",
        example="ValueError: Attempting to unscale FP16 gradients.",
        seen=_SEEN,
    ),
    Signature(
        id="H1273",
        title="the loss scaler is used before any loss was scaled",
        family="numerics",
        patterns=(r"Attempted \w+ but _scale is None",),
        means="unscale_, step or update ran, but scaler.scale(loss) was never called: the plain loss went backward.",
        fix="Use scaler.scale(loss).backward().",
        example="AssertionError: Attempted unscale_ but _scale is None.  This may indicate your script did not "
        "use scaler.scale(loss or outputs) earlier in the iteration.",
        seen=_SEEN,
    ),
    Signature(
        id="H1274",
        title="calls of the loss scaler are in the wrong order",
        family="numerics",
        patterns=(
            r"step\(\) has already been called since the last update\(\)",
            r"unscale_\(\) is being called after step\(\)",
        ),
        means="The order in an iteration is: scale, backward, unscale_ (once), step, update.",
        fix="Call scaler.update() once after the last step() of each iteration, and unscale_ before step().",
        example="RuntimeError: step() has already been called since the last update().",
        seen=_SEEN,
    ),
    Signature(
        id="H1275",
        title="the loss scaler cannot step with a closure",
        family="numerics",
        patterns=(r"Closure use is not currently supported if GradScaler is enabled",),
        means="Optimizers such as LBFGS evaluate the loss within step(); a scaler cannot check those gradients.",
        fix="Train this part in float32 or bfloat16 without a scaler.",
        example="RuntimeError: Closure use is not currently supported if GradScaler is enabled.",
        seen=_SEEN,
    ),
    Signature(
        id="H1288",
        title="the state of a loss scaler that was switched off is loaded",
        family="checkpoint",
        patterns=(r"The source state dict is empty, possibly because it was saved from a disabled instance of",),
        means="The checkpoint was written with the scaler disabled, so its state is empty, and now it is enabled.",
        fix="Load it only if it is not empty, or keep the same setting. A fresh scaler finds its scale soon.",
        example="RuntimeError: The source state dict is empty, possibly because it was saved from a disabled "
        "instance of GradScaler.",
        seen=_SEEN,
    ),
    Signature(
        id="H1289",
        title="the loss scaler is given something that is no tensor",
        family="numerics",
        patterns=(r"outputs must be a Tensor or an iterable of Tensors",),
        means="scaler.scale got a number or a model's output instead of the loss.",
        fix="Pass the loss tensor, without .item().",
        example="ValueError: outputs must be a Tensor or an iterable of Tensors",
        seen=_SEEN,
    ),
    Signature(
        id="H1280",
        title="the loss scale fell to its minimum: every step overflowed",
        family="numerics",
        explains=("H1302",),  # apex divides by the scale, which has become 0
        patterns=(
            r"\breducing loss scale to \d[\d.]*e-(?:[3-9]\d|\d{3})\b",
            r"Minimum loss scale reached \(",
            r"Current loss scale already at minimum - cannot decrease scale anymore",
        ),
        means="Gradients were NaN or infinite in so many steps that the scale could not be halved any more. The loss "
        "or the weights are not finite, whatever the scale.",
        fix="Go back to a checkpoint before the first overflow. Lower the learning rate, clip, check the data, or "
        "use bfloat16.",
        example="FloatingPointError: Minimum loss scale reached (0.0001). Your loss is probably exploding. Try "
        "lowering the learning rate, using gradient clipping or increasing the batch size.",
        seen="fairseq and DeepSpeed; not installed here, not reproduced",
        also={
            "DeepSpeed": "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting "
            "run.",
        },
    ),
    Signature(
        id="H1276",
        title="autocast is used wrongly",
        family="numerics",
        patterns=(
            r"User specified an unsupported autocast device_type",
            r"Expected `device_type` of type `str`, got:",
            r"autocast\(\)\(func\) requires a callable",
            r"\bautocast\.__init__\(\) (?:missing|got)",
        ),
        means="torch.autocast takes the kind of device as a text, such as 'cuda' or 'cpu', and is a context manager "
        "or decorator.",
        fix="Pass device.type, and write `with torch.autocast(device.type, dtype=...):`.",
        example="ValueError: Expected `device_type` of type `str`, got: `<class 'torch.device'>`",
        seen=_SEEN,
    ),
    Signature(
        id="H1270",
        title="binary cross entropy under autocast",
        family="numerics",
        patterns=(r"binary_cross_entropy and torch\.nn\.BCELoss are unsafe to autocast",),
        means="BCELoss of float16 probabilities loses its gradients near 0 and 1.",
        fix="Use BCEWithLogitsLoss and drop the sigmoid, or compute this loss in float32 outside of autocast.",
        example="RuntimeError: torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.",
        seen="torch 1.6 to 2.13 on CUDA; the CPU computes it in float32, so it is not reproduced here",
    ),
)

_TYPES: tuple[Signature, ...] = (
    Signature(
        id="H1271",
        title="an operation does not exist for this short float type",
        family="shape or type",
        rank=70,
        patterns=(
            r"\bnot implemented for '(?:Half|BFloat16|Float8_\w+|ComplexHalf)'",
            r"Low precision dtypes not supported\. Got (?:Half|BFloat16)",
            r"(?:Unsupported dtype|Got unsupported ScalarType) (?:Half|BFloat16|Float8_\w+)",
            r"Expected a float, double, cfloat or cdouble[^\n]{0,40}got (?:Half|BFloat16)",
        ),
        means="float16, bfloat16 or 8-bit floats met an operation that has no kernel for them on this device: linear "
        "algebra, histograms, many CPU operations.",
        fix="Convert to float32 around it: op(x.float()).to(x.dtype). On a CPU prefer bfloat16 to float16.",
        example="RuntimeError: linalg.inv: Low precision dtypes not supported. Got Half",
        seen=_SEEN,
        also={
            "torch 2.0, a convolution": "RuntimeError: \"slow_conv2d_cpu\" not implemented for 'Half'",
            "torch 1.13": "RuntimeError: \"addmm_impl_cpu_\" not implemented for 'Half'",
            "torch 2.0": "RuntimeError: \"LayerNormKernelImpl\" not implemented for 'Half'",
        },
    ),
    Signature(
        id="H1272",
        title="integers are given to an operation that needs floats",
        family="shape or type",
        rank=72,
        patterns=(
            r"\bnot implemented for '(?:Long|Int|Short|Char|Byte|Bool)'",
            r"could not infer output dtype\. Input dtype must be either a floating point or complex",
            r"Expected a floating point or complex tensor as input\. Got (?:Long|Int|Short|Char|Byte|Bool)",
            r"Can only calculate the mean of floating types",
            r"only supports? floating[- ]point(?: and complex)? dtypes",
            r"quantile\(\) input tensor must be either float or double dtype",
        ),
        means="Mean, softmax, norm and most functions are defined for floats only; indices, labels, comparisons and "
        "raw images are integers or booleans.",
        fix="Call .float() before.",
        example="RuntimeError: mean(): could not infer output dtype. Input dtype must be either a floating point "
        "or complex dtype. Got: Bool",
        seen=_SEEN,
        also={
            "torch 1.4": "RuntimeError: Can only calculate the mean of floating types. Got Long instead.",
        },
    ),
    Signature(
        id="H1277",
        title="a number is too large for float16",
        family="numerics",
        patterns=(r"value cannot be converted to type (?:at::|c10::)?(?:Half|BFloat16|float) without overflow",),
        means="A constant such as -1e9 or the minimum of float32 is written into a float16 tensor, whose range ends "
        "at 65504. Mostly it is the mask of an attention.",
        fix="Use torch.finfo(x.dtype).min or float('-inf') for masks.",
        example="RuntimeError: value cannot be converted to type c10::Half without overflow",
        seen=_SEEN,
        also={
            "torch 1.7": "RuntimeError: value cannot be converted to type at::Half without overflow: -1e+09",
        },
    ),
    Signature(
        id="H1278",
        title="a whole number is too large for its type",
        family="shape or type",
        patterns=(
            r"Overflow when unpacking (?:long|unsigned long|double)",
            r"value cannot be converted to type u?int\d*(?:_t)? without overflow",
            r"Python integer -?\d+ out of bounds for u?int\d+",
            r"Python int too large to convert to C (?:long|int)",
            r"int too big to convert",
        ),
        means="A seed, index, hash or label does not fit into the integer type that it is written to.",
        fix="Use int64, or reduce the number (a seed: modulo 2**63). Labels of 255 need uint8 or int16.",
        example="ValueError: Overflow when unpacking long long",
        seen=_SEEN,
    ),
    Signature(
        id="H1279",
        title="a result in floats does not fit into an integer tensor in place",
        family="shape or type",
        patterns=(
            r"result type \w+ can't be cast to the desired (?:output|out=) type (?:unsigned char|\w+)",
            r"Cannot cast ufunc '[\w.]+' output from dtype\('\w+'\) to dtype\('\w+'\)",
        ),
        means="An in-place operation such as += or /= would write floats into integers.",
        fix="Make the left side float first: total = torch.tensor(0.0), image.astype(np.float32), x.float().",
        example="RuntimeError: result type Float can't be cast to the desired output type Long",
        seen=_SEEN,
    ),
    Signature(
        id="H1287",
        title="quantised and float tensors are mixed",
        family="shape or type",
        patterns=(
            r"Could not run '(?:aten|quantized)::[\w.]+' with arguments from the '\w*Quantized\w*' backend",
            r"Could not run 'quantized::[\w.]+' with arguments from the '\w+' backend",
            r"Didn't find engine for operation quantized::\w+",
            r"promoteTypes with quantized numbers is not handled",
            r"Got unsupported ScalarType Q\w+",
            r"must have the same dtype, but got (?:Q\w+ and \w+|\w+ and Q\w+)",
        ),
        means="A quantised layer got floats, or a float operation got a quantised one, or this build has no engine "
        "for quantised operations.",
        fix="Put QuantStub and DeQuantStub around the quantised part, or dequantize() first. Set "
        "torch.backends.quantized.engine to one of its supported_engines.",
        example="NotImplementedError: Could not run 'quantized::linear' with arguments from the 'CPU' backend. "
        "This could be because the operator doesn't exist for this backend, or was omitted during the "
        "selective/custom build process (if using custom build). If you are a Facebook employee using "
        "PyTorch on mobile, please visit https://fburl.com/ptmfixes for possible resolutions. "
        "'quantized::linear' is only available for these backends: [Meta, QuantizedCPU, BackendSelect, "
        "Python, FuncTorchDynamicLayerBackMode, Functionalize, Conjugate, Negative, ZeroTensor, "
        "ADInplaceOrView, AutogradOther, AutogradCPU, AutogradCUDA, AutogradXLA, AutogradMPS, "
        "AutogradXPU, AutogradHPU, AutogradLazy, AutogradMTIA, AutogradMAIA, AutogradPrivateUse1, A",
        seen=_SEEN,
    ),
)

SIGNATURES: tuple[Signature, ...] = (*_SCALING, *_TYPES, *_NONFINITE)
"""Every signature of precision."""
