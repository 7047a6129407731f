"""Signatures of shapes that do not fit: products, convolutions, broadcasting, reshaping, indexing.

What a layer or a loss says of its input lies in ``layer_inputs``; indices out of range in ``values``.
"""

from __future__ import annotations

from holdfast.explain.signature import Signature

SIGNATURES: tuple[Signature, ...] = (
    Signature(
        id="H965",
        title="a matrix product of sizes that do not fit, mostly a Linear with another in_features",
        family="shape or type",
        patterns=(
            r"\bmat1 and mat2 shapes cannot be multiplied \(\d+x\d+ and \d+x\d+\)",
            r"\bsize mismatch, (?:m1: \[|got input \(|got, input \()",
            r"\bsize mismatch, got [^\n]{0,20}(?:mat|vec|input)",
            r"\bExpected size for first two dimensions of batch2 tensor to be\b",
            r"\bmatmul: Input operand \d has a mismatch in its core dimension",
            r"\bshapes \([\d,]+\) and \([\d,]+\) not aligned\b",
            r"\binconsistent tensor size, expected tensor \[[\d, ]+\] and src",
            r"\bself must be a (?:matrix|vector)\b",
            r"\bouter: Expected 1-D argument",
            r"\bIncompatible shapes of A and B\b",
            r"\bcontracted dimensions need to match\b",
            r"\bX1 and X2 must have the same number of columns\b",
            r"\bhas a mismatch in its core dimension\b",
            r"\bmust be (?:batches of )?square\b",
            r"\binput\.size\(-2\) should match other\.size",
            r"\bbilinear\(\): input\d size does not match weight size",
        ),
        exceptions=("RuntimeError", "ValueError", "LinAlgError"),
        means="The last size of the input is not the `in_features` of the layer, or the inner sizes of a product "
        "differ. After a flatten it depends on the resolution of the image.",
        fix="Print the shape right before the layer and set `in_features` to its last size (`nn.LazyLinear` finds "
        "it by itself). Flatten with `x.flatten(1)`; in a product of batches transpose the right one "
        "(`key.transpose(-2, -1)`).",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n  File '
        '".venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 134, in forward\nRuntimeError: '
        "mat1 and mat2 shapes cannot be multiplied (2x8192 and 2048x10)",
        seen="reproduced on torch 2.13",
        also={
            "torch 1.4": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "RuntimeError: size mismatch, m1: [16 x 576], m2: [400 x 120] at "
            "/pytorch/aten/src/TH/generic/THTensorMath.cpp:41",
        },
    ),
    Signature(
        id="H966",
        title="a convolution got another number of channels",
        family="shape or type",
        patterns=(
            (
                r"\bGiven (?:groups=\d+|transposed=\d+), weight of size \[[\d, ]+\], expected input\[[\d, ]+\] to "
                r"have \d+ channels"
            ),
            r"\bGiven groups=\d+, weight\[[\d, ]+\], so expected input\[[\d, ]+\] to have \d+ channels",
        ),
        means="The second size of the input is not `in_channels`: gray instead of colour pictures, channels last "
        "as numpy and PIL have them, or a concatenation that added channels.",
        fix="Print the shape. For (batch, height, width, channels) use `x.permute(0, 3, 1, 2)`; for audio features "
        "`x.transpose(1, 2)`; gray pictures need `in_channels=1` or `x.expand(-1, 3, -1, -1)`.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nRuntimeError: '
        "Given groups=1, weight of size [16, 3, 3, 3], expected input[8, 1, 28, 28] to have 3 channels, but got 1 "
        "channels instead",
        seen="reproduced on torch 2.13",
        also={
            "torch 0.4": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "RuntimeError: Given groups=1, weight[64, 3, 7, 7], so expected input[4, 1, 224, 224] to have 3 "
            "channels, but got 1 channels instead",
        },
    ),
    Signature(
        id="H967",
        title="the picture or sequence is smaller than a kernel",
        family="shape or type",
        patterns=(
            r"\bKernel size can't be greater than actual input size\b",
            r"\bGiven input size: \([\dx]+\)\. Calculated output size: \([\dx-]+\)\. Output size is too small",
            r"\bOutput size is too small\b",
            r"\bkernel size should be (?:less|smaller) than\b",
            r"\bInput and output sizes should be greater than 0\b",
        ),
        means="After some strides and poolings the map is smaller than the kernel of the next layer, since the "
        "input is smaller than the network was made for.",
        fix="Give larger pictures or longer sequences (pad short ones), or take out strides and poolings. "
        "`nn.AdaptiveAvgPool2d` before the last layers accepts any size.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nRuntimeError: '
        "Calculated padded input size per channel: (2 x 2). Kernel size: (3 x 3). Kernel size can't be greater "
        "than actual input size",
        seen="reproduced on torch 2.13",
        also={
            "pooling": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "RuntimeError: Given input size: (4x1x1). Calculated output size: (4x0x0). Output size is too small",
        },
    ),
    Signature(
        id="H968",
        title="sizes that do not fit in an addition, a comparison or a concatenation",
        family="shape or type",
        patterns=(
            r"\bThe size of tensor a \(\d+\) must match the size of tensor b \(\d+\)",
            r"\bSizes of tensors must match except in dimension \d+",
            r"\bThe expanded size of the tensor \(\d+\) must match the existing size \(\d+\)",
            r"\boutput with shape \[[\d, ]*\] doesn't match the broadcast shape",
            r"\boperands could not be broadcast together with shapes",
            r"\ball the input array dimensions (?:except for|must match exactly)",
            r"\bsize of tensors? \w+ \(?\d+\)? must match",
            r"\binvalid argument 0: Sizes of tensors must match",
            r"\bshape mismatch: objects cannot be broadcast to a single shape",
            r"\bSize does not match at dimension \d+ expected (?:index|src)",
            r"\bexpand\([^\n]{0,200}\): the number of sizes provided",
            r"\boperands could not be broadcast together with (?:remapped )?shapes",
            r"\bAttempting to broadcast a dimension of length\b",
            r"\bto be no larger than self \[[\d, ]*\] apart from dimension",
            r"\bexpected grid (?:and input )?to have (?:same batch size|size \d in last dimension)",
            r"\bNumber of indices \(\d+\) should be equal to source\.size\(dim\)",
        ),
        means="Two tensors meet in one operation and a size differs that is not 1. Usual causes: the last smaller "
        "batch, an odd size halved and doubled, a residual without projection, a sequence longer than the position "
        "table.",
        fix="Print both shapes at this line. Crop or pad to the same size, add a projection to the residual, use "
        "`drop_last=True` or build the other tensor from `x.size(0)` rather than from the batch size.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nRuntimeError: The '
        "size of tensor a (9) must match the size of tensor b (5) at non-singleton dimension 3",
        seen="reproduced on torch 2.13",
        also={
            "concatenation": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "RuntimeError: Sizes of tensors must match except in dimension 1. Expected size 25 but got size 24 for "
            "tensor number 1 in the list.",
            "torch 1.4": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "RuntimeError: invalid argument 0: Sizes of tensors must match except in dimension 1. Got 25 and 24 in "
            "dimension 2 at /pytorch/aten/src/TH/generic/THTensor.cpp:612",
            "numpy": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nValueError: '
            "operands could not be broadcast together with shapes (10,4) (10,) ",
        },
    ),
    Signature(
        id="H969",
        title="a view or reshape to a size that does not hold the elements, or of strided memory",
        family="shape or type",
        patterns=(
            r"\bshape '\[[-\d, ]*\]' is invalid for input of size \d+",
            r"\bview size is not compatible with input tensor's size and stride\b",
            r"\binput is not contiguous at \S+/generic/THTensor",
            r"\bcannot reshape array of size \d+ into shape\b",
            r"\bcannot reshape tensor of \d+ elements into shape\b",
            r"\bunflatten: Provided sizes \[[-\d, ]*\] don't multiply up to\b",
            r"\bonly one dimension can be inferred\b|\bcan only specify one unknown dimension\b",
            r"\bcannot reshape tensor of 0 elements into shape\b",
        ),
        means="The sizes asked for do not multiply to the number of elements; or `.view` was used after a permute "
        "or transpose, where the memory is not in that order.",
        fix="Use `x.reshape(...)` in place of `.view` after a permute. Else print `x.shape`: keep the batch "
        "(`x.reshape(x.size(0), -1)`) and check that the width divides by the number of heads or patches.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nRuntimeError: '
        "shape '[4, -1, 7]' is invalid for input of size 960",
        seen="reproduced on torch 2.13",
        also={
            "strides": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "RuntimeError: view size is not compatible with input tensor's size and stride (at least one dimension "
            "spans across two contiguous subspaces). Use .reshape(...) instead.",
        },
    ),
    Signature(
        id="H971",
        title="tensors of different dtypes in one operation, or a dtype that it does not take",
        family="shape or type",
        patterns=(
            r"\bexpected scalar type \w+ but found \w+",
            r"\bExpected object of (?:scalar type|type) [\w.]+ but got ",
            r"\bmust have the same dtype\b|\bto have the same dtype, but got\b|\bhave the same dtype, got\b",
            r"\bInput type \([\w.: ]+\) and (?:weight|bias) type \([\w.: ]+\) should be the same",
            r"\bExpected tensor for argument #\d+ '\w+' to have one of the following scalar types",
            r"\bexpected target dtype to be Long\b",
            r"\btensors used as indices must be long, int, byte or bool tensors\b",
            r"\b\w+\(\): Expected (?:dtype int64|dtype int32/int64|index to have)\b",
            r"\bRNN input dtype \([\w.]+\) does not match weight dtype",
            r"\bdoes not match weight dtype\b",
            r"\b(?:expected|Expected) (?:m1|mat1|query|input|target|self)\b[^\n]{0,60} (?:same dtype|dtype Long)",
            r"\b\w+: expected dtype for `?\w+`? ",
            r"\bnll_loss\w*\x22 not implemented for '\w+'",
            r"\bexpected mat1 and mat2 to have the same dtype",
            r"\bFound dtype \w+ but expected \w+",
            r"\belements in indices should be type int64 but got",
            r"\bonly supports boolean masks, but got mask with dtype",
            r"\bone_hot is only applicable to index tensor\b",
            r"\bonly integers, slices \(`:`\), ellipsis",
            r"\boperator\.invert\) is only implemented on integer",
            r"\bstd and var only support floating point\b|\bdtype must be a floating point but you specified\b",
            r"\brequires a complex-valued input tensor\b",
        ),
        exceptions=("RuntimeError", "TypeError", "IndexError", "ValueError"),
        means="Two tensors of one operation have different dtypes: numpy gives float64, images are uint8, a model "
        "was made half. Labels and indices must be int64.",
        fix="Convert at the edge: `torch.from_numpy(x).float()` for features, `.long()` for labels and indices, "
        "`image.float() / 255`. With a half model use `torch.autocast` rather than `.half()`.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nRuntimeError: mat1 '
        "and mat2 must have the same dtype, but got Double and Float",
        seen="reproduced on torch 2.13",
        also={
            "torch 1.4": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "RuntimeError: Expected object of scalar type Long but got scalar type Float for argument #2 'target' "
            "in call to _thnn_nll_loss_forward",
            "torch 1.12": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "RuntimeError: expected scalar type Long but found Float",
            "convolution": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "RuntimeError: Input type (torch.FloatTensor) and weight type (torch.HalfTensor) should be the same or "
            "input should be a MKLDNN tensor and weight is a dense tensor",
        },
    ),
    Signature(
        id="H1310",
        title="a dimension that the tensor does not have",
        family="shape or type",
        patterns=(
            r"\bDimension out of range \(expected to be in range of \[",
            r"\btoo many indices for (?:tensor of dimension \d+|array)",
            r"\bTensors must have same number of dimensions: got \d+ and \d+",
            r"\baxis \d+ is out of bounds for array of dimension \d+",
            (
                r"\bnumber of dimensions in the tensor input does not match the length of the desired ordering of "
                r"dimensions"
            ),
            r"\bnumber of dims don't match in permute\b",
            r"\bDimension specified as -?\d+ but tensor has no dimensions\b",
            r"\binvalid index of a 0-dim tensor\b",
            r"\bslice\(\) cannot be applied to a 0-dim tensor\b",
            r"\bzero-dimensional tensor \(at position \d+\) cannot be concatenated\b",
            r"\b(?:iteration over a 0-d (?:tensor|array)|len\(\) of (?:a 0-d tensor|unsized object))",
            r"\ball the input arrays must have same number of dimensions\b",
            r"\baxes don't match array\b",
            r"\b(?:must|should) have at least \d dimensions\b",
            r"\bExpected tensor with \d or more dimensions\b",
            r"\bduplicate dims are not allowed\b|\bdim \d appears multiple times\b",
            r"\bexpects a tensor with <= \d dimensions",
            r"\bNumber of dimensions of repeat dims can not be smaller\b",
            r"\bexpected total dims >= \d",
            r"\bSupports \dD or \dD tensors\. Got",
            r"\bIndex is supposed to be a vector\b",
            r"\bmust have the same number of dimensions as\b",
            r"\bthe input must be 1D or 2D\. Got",
            r"\bExpected \dD or \dD tensor in the tensor list",
            r"\bmust be 1 or 2 dim\b",
            r"\bFan in and fan out can not be computed for tensor with fewer than 2 dimensions",
            r"\bOnly tensors with 2 or more dimensions are supported\b",
            r"\bboundaries tensor (?:must|should) be 1 dimension",
        ),
        exceptions=("IndexError", "RuntimeError", "AxisError", "ValueError", "TypeError"),
        means="`dim=`, an index or `permute` names a dimension that is not there, since the tensor has fewer than "
        "was thought: a batch of one that `squeeze()` flattened, a mono file, a single sample without batch.",
        fix="Print `x.shape`. Give `squeeze` the dimension to remove (`squeeze(-1)`), add the batch with "
        "`x.unsqueeze(0)`, and count dimensions from the end (`dim=-1`).",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nIndexError: '
        "Dimension out of range (expected to be in range of [-1, 0], but got 1)",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1314",
        title="a mask, an index or a value to assign has another shape than the tensor",
        family="shape or type",
        patterns=(
            r"\bThe shape of the mask \[[\d, ]*\] at index \d+ does not match the shape of the indexed tensor",
            r"\bshape mismatch: (?:value tensor|indexing tensors?) ",
            r"\bshape mismatch: indexing (?:arrays|tensors) could not be broadcast",
            r"\bshape mismatch: value array of shape",
            r"\bboolean (?:index|dimension)[^\n]{0,60} (?:did not match|is \d+ but corresponding)",
            r"\bcould not broadcast input array from shape\b",
            r"\bThe shape of the (?:2D|3D) attn_mask is torch\.Size\(",
            r"\bExpected key_(?:padd(?:ing|ed)_)?mask",
            r"\bkey_padding_mask(?:\.shape)?\b[^\n]{0,80}(?:but got|== |to be true)",
            r"\bmask (?:shape|size)\b[^\n]{0,60}\bshould be\b",
            r"\bThe size of the attn_mask is not correct\b",
            r"\bcannot assign \d+ input values to the \d+ output values\b",
            r"\bNumber of elements of source < number of ones in mask\b",
        ),
        exceptions=("IndexError", "RuntimeError", "ValueError", "AssertionError"),
        means="A boolean mask must have the shape of what it selects from; what is assigned must have the shape of "
        "the place; an attention mask must be (length, length) and a padding mask (batch, length).",
        fix="Print the two shapes. Build the mask from the batch as it is now rather than from the longest "
        "sequence, and mind the order: padding masks stay (batch, length) also without `batch_first`.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nIndexError: The '
        "shape of the mask [8] at index 0 does not match the shape of the indexed tensor [6, 4] at index 0",
        seen="reproduced on torch 2.13",
        also={
            "attention": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "RuntimeError: The shape of the 2D attn_mask is torch.Size([10, 10]), but should be (6, 6).",
        },
    ),
    Signature(
        id="H1315",
        title="einsum: letters and sizes do not fit the tensors",
        family="shape or type",
        patterns=(
            r"\beinsum\(\): ",
            r"\beinsum: operands could not broadcast",
            r"\beinstein sum subscripts string\b",
            r"\bEinopsError\b|\bError while processing (?:rearrange|repeat|reduce)-",
        ),
        means="The number of letters of a term is not the number of dimensions of its tensor, or one letter stands "
        "for two different sizes.",
        fix="Print the shapes and write each beside its term of the equation; every letter must have one size.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nRuntimeError: '
        "einsum(): the number of subscripts in the equation (3) does not match the number of dimensions (4) for "
        "operand 0 and no ellipsis was given",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1316",
        title="arithmetic on booleans",
        family="shape or type",
        patterns=(
            r"\bSubtraction, the `-` operator, with (?:two bool tensors|a bool tensor) is not supported",
            r"\bNegation, the `-` operator, on a bool tensor is not supported",
            r"\bnumpy boolean (?:subtract|negative), the `-` operator, is not supported",
        ),
        means="Masks and comparisons are booleans, and `-` has no meaning for them.",
        fix="Use `~mask` for the inverse, `a & ~b` for the difference, `a ^ b` for what differs, or `.float()` "
        "before arithmetic.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nRuntimeError: '
        "Subtraction, the `-` operator, with two bool tensors is not supported. Use the `^` or `logical_xor()` "
        "operator instead.",
        seen="reproduced on torch 2.13",
    ),
)
