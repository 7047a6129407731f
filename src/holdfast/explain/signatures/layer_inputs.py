"""Signatures of what layers and losses say of what they were not built for: other shapes, or no tensors at all.

Shapes in plain operations lie in ``shapes``.
"""

from __future__ import annotations

from holdfast.explain.signature import Signature

SIGNATURES: tuple[Signature, ...] = (
    Signature(
        id="H973",
        title="the target of an elementwise loss has another shape than the prediction",
        family="shape or type",
        patterns=(
            r"\bUsing a target size \(torch\.Size\(\[[\d, ]*\]\)\) that is different to the input size",
            r"\bTarget size \(torch\.Size\(\[[\d, ]*\]\)\) must be the same as input size",
        ),
        only_exceptions=True,
        means="Losses that compare element by element need equal shapes. Mostly the prediction is (batch, 1) and "
        "the target (batch,). `MSELoss` only warns of it and then broadcasts to (batch, batch), which trains on "
        "nonsense.",
        fix="Give both the same shape: `prediction.squeeze(-1)` or `target.unsqueeze(-1)`. Never ignore the warning.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nValueError: Target '
        "size (torch.Size([8])) must be the same as input size (torch.Size([8, 1]))",
        seen="reproduced on torch 2.13",
        also={
            "binary cross entropy": 'Traceback (most recent call last):\n  File "train.py", line 41, in '
            "<module>\nValueError: Using a target size (torch.Size([8, 1])) that is different to the input size "
            "(torch.Size([8, 2])) is deprecated. Please ensure they have the same size.",
        },
    ),
    Signature(
        id="H974",
        title="batch normalisation of a single value for each channel",
        family="shape or type",
        patterns=(r"\bExpected more than 1 (?:value per channel|spatial element) when training, got input size\b",),
        means="In training mode the mean and variance are taken over the batch, and there is one value: the last "
        "batch of an epoch has one sample, or a pooled map of a batch of one.",
        fix="Use `drop_last=True` in the loader of the training set, or a batch size that does not leave one "
        "sample. For a batch size of one use GroupNorm, or `.eval()` if it is an evaluation.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nValueError: '
        "Expected more than 1 value per channel when training, got input size torch.Size([1, 8])",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1311",
        title="a layer got an input with too many or too few dimensions",
        family="shape or type",
        patterns=(
            r"\bExpected \dD \(unbatched\) or \dD \(batched\) input to \w+",
            r"\bexpected (?:at least )?\dD(?: or \dD)? input \(got \dD input\)",
            r"\b(?:RNN|LSTM|GRU|\w+Cell): Expected (?:input|hidden|hx\[\d\]) to be \dD or \dD, got \dD",
            r"\binput must have \d dimensions, got \d",
            r"\bFor (?:un)?batched \d-D input, hx (?:and cx )?should also be",
            r"\bExpected \dD or \dD \(batch mode\) tensor\b",
            r"\bGot \dD input, but \w+ mode needs \dD input",
            r"\bInput Error: Only 3D, 4D and 5D input Tensors supported",
            r"\bExpected \d-dimensional input for \d-dimensional weight\b",
            (
                r"\bmax_pool\dd\(\): Expected \dD or \dD|\bnon-empty \dD or \dD \(batch mode\) tensor expected for "
                r"input"
            ),
            r"\badaptive_avg_pool\dd\(\): Expected \dD",
            r"\bInput and (?:output|scale_factor) must have the same number of spatial dimensions",
            r"\bExpected at least \d dimensions for input tensor but received",
            r"\bExpected \dD or higher dimensionality\b",
            r"\bexpected (?:stride|padding|dilation) to be a single integer value or a list of \d values",
        ),
        exceptions=("RuntimeError", "ValueError", "NotImplementedError", "AssertionError"),
        means="The layer expects a batch of images, sequences or vectors, and got a tensor with another number of "
        "dimensions: without the batch, flattened, or with one more.",
        fix="Print the shape before the layer. Add a batch with `x.unsqueeze(0)`, or use the layer for this kind: "
        "BatchNorm1d after a Linear, BatchNorm2d after a Conv2d.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n  File '
        '".venv/lib/python3.11/site-packages/torch/nn/modules/batchnorm.py", line 496, in _check_input_dim\n'
        "ValueError: expected 4D input (got 2D input)",
        seen="reproduced on torch 2.13",
        also={
            "convolution": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "RuntimeError: Expected 3D (unbatched) or 4D (batched) input to conv2d, but got input of size: [16, "
            "784]",
            "torch 1.8": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "RuntimeError: Expected 4-dimensional input for 4-dimensional weight [32, 1, 3, 3], but got "
            "2-dimensional input of size [64, 784] instead",
        },
    ),
    Signature(
        id="H1312",
        title="a layer was built for another number of features",
        family="shape or type",
        patterns=(
            r"\binput\.size\(-1\) must be equal to input_size\. Expected \d+, got \d+",
            r"\bGiven normalized_shape=\[[\d, ]+\], expected input with shape",
            r"\brunning_mean should contain \d+ elements not \d+",
            r"\bweight should contain \d+ elements not \d+",
            r"\bExpected hidden(?:\[\d\])? size \([\d, ]+\), got ",
            r"\bembed_dim must be divisible by num_heads\b",
            r"\bwas expecting embedding dimension of \d+, but got \d+",
            r"\bExpected number of channels in input to be divisible by num_groups\b",
            r"\bnum_channels(?: \(\d+\))? must be divisible by num_groups\b",
            r"\b(?:in|out)_channels must be divisible by groups\b",
            r"\bExpected weight to be a vector of size equal to the number of channels in input",
            r"\bthe feature number of src and tgt must be equal to d_model\b",
            r"\binput has inconsistent input_size: got \d+",
            r"\bHidden sizes? should be\b|\bhidden has inconsistent hidden_size\b",
            r"\bexpected input's size at dim=\d to match num_features\b",
            r"\bdoesn't match hidden\d? batch size\b|\bhas inconsistent hidden_size\b",
            r"\bMismatch of parameter numbers and input channel size\b",
            r"\bdivisible by the square of upscale_factor\b",
            r"\bNumber of channels must be divisible by groups\b",
            r"\bHalving dimension must be even\b",
            r"\bthe batch number of src and tgt must be equal\b",
        ),
        means="A recurrent layer, a normalisation or an attention was built for another width than the tensor has, "
        "a width does not divide by the number of heads or groups, or the hidden state is of another batch size.",
        fix="Print the shape and compare with the arguments of the layer. Normalise over the last dimension "
        "(transpose before if features are elsewhere); make the hidden state anew for each batch size.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n  File '
        '".venv/lib/python3.11/site-packages/torch/nn/modules/rnn.py", line 329, in check_input\nRuntimeError: '
        "input.size(-1) must be equal to input_size. Expected 32, got 16",
        seen="reproduced on torch 2.13",
        also={
            "normalisation": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "RuntimeError: Given normalized_shape=[64], expected input with shape [*, 64], but got input of "
            "size[2, 64, 10]",
        },
    ),
    Signature(
        id="H1313",
        title="batch sizes or shapes of prediction and target do not fit the loss",
        family="shape or type",
        patterns=(
            r"\bExpected input batch_size \(\d+\) to match target batch_size \(\d+\)",
            r"\bExpected target size \[[\d, ]*\], got \[[\d, ]*\]",
            r"\b0D or 1D target tensor expected, multi-target not supported\b",
            r"\bmulti-target not supported at\b",
            r"\bonly batches of spatial targets supported\b",
            r"\bsize mismatch \(got input: \[[\d, ]*\] ?, target: \[[\d, ]*\]",
            r"\b1D target tensor expected, multi-target not supported\b",
            r"\binconsistent target size\b|\bmismatch on dimension 0 for tensors\b",
            r"\bweight tensor should be defined either for all (?:\d+ )?classes or no classes\b",
            r"\bFor 1D input, 1D target must have size 1\b",
            r"\bExpected target size \[[\d, ]*\], but got",
            r"\bAll input tensors should have same dimension but got sizes\b",
            r"\bvar is of incorrect size\b",
        ),
        exceptions=("RuntimeError", "ValueError"),
        means="A classification loss needs logits (batch, classes, ...) and labels (batch, ...). The batch sizes "
        "differ, the classes stand last, or the target is one-hot or has a channel dimension.",
        fix="Move classes to dimension 1 (`logits.transpose(1, 2)`), or flatten both alike: `logits.reshape(-1, "
        "classes)` and `labels.reshape(-1)`. One-hot targets become `target.argmax(1)`; a mask (batch, 1, h, w) "
        "loses its channel by `.squeeze(1)`.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nValueError: '
        "Expected input batch_size (28) to match target batch_size (4).",
        seen="reproduced on torch 2.13",
        also={
            "segmentation": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "RuntimeError: only batches of spatial targets supported (3D tensors) but got targets of dimension: 4",
        },
    ),
    Signature(
        id="H1317",
        title="lengths, paddings, strides or splits that do not fit the tensor",
        family="shape or type",
        patterns=(
            r"\bPadding size should be less than the corresponding input dimension\b",
            r"\bLength of all samples has to be greater than 0\b",
            r"\b`?lengths`? array must be sorted in decreasing order\b",
            r"\b'lengths' argument should be a 1D CPU int64 tensor\b",
            r"\bsplit_with_sizes expects split_sizes to sum exactly to \d+",
            r"\bExpected (?:input|target)_lengths to have value at (?:most|least)\b",
            (
                r"\bExpected tensor to have size at least \d+ at dimension \d+, but got size \d+ for argument #\d+ "
                r"'targets'"
            ),
            r"\btarget_lengths must be of size batch_size\b|\binput_lengths must be of size batch_size\b",
            r"\bExpected `?len\(?lengths\)?`? to be equal to batch_size\b",
            r"\bstart \(\d+\) \+ length \(\d+\) exceeds dimension size\b",
            r"\bmaximum size for tensor at dimension \d+ is \d+ but size is \d+",
            r"\bTrying to create tensor with negative dimension\b",
            r"\bstft\([^\n]{0,200}\): expected \b",
            r"\bPadding length (?:should|must) be (?:less|divisible)",
            r"\breceived an empty list of sequences\b",
            r"\bto match the calculated number of sliding blocks\b",
            r"\boutput padding must be smaller than either stride or dilation\b",
            r"\bpad should be at most half of (?:effective )?kernel size\b",
            r"\bsplit expects split_size be non-negative\b|\bchunk expects `chunks` to be greater than 0",
            r"\bnon-positive stride is not supported\b|\bnegative padding is not supported\b",
            (
                r"\bnumber of steps must be non-negative\b|\brequires non-negative window_length\b|\bn must be "
                r"greater or equal to 0\b"
            ),
            r"\bselected (?:index|number) k out of range\b",
            r"\bupper bound and (?:larger|lower) bound inconsistent with step sign\b",
            r"\boffsets(?:\[0\])? has to be\b",
            r"\brequested an output size of \[[\d, ]+\], but valid sizes range\b",
        ),
        means="A sequence is empty or longer than its tensor, sequences are not sorted, a reflection is longer "
        "than the signal, parts do not add up to the whole, or `k` exceeds what there is.",
        fix="Print lengths and shape together. Drop empty samples; pass `enforce_sorted=False` to "
        "`pack_padded_sequence`; pad clips that are shorter than the window of the transform.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nRuntimeError: '
        "Length of all samples has to be greater than 0, but found an element in 'lengths' that is <= 0",
        seen="reproduced on torch 2.13",
        also={
            "split": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nRuntimeError: '
            "split_with_sizes expects split_sizes to sum exactly to 30 (input tensor's size at dimension 1), but "
            "got split_sizes=[10, 10, 9]",
        },
    ),
    Signature(
        id="H1393",
        title="a model of transformers returned no loss, since it got no labels",
        family="user code",
        patterns=(r"\bThe model did not return a loss from the inputs, only the following keys\b",),
        means="The Trainer takes the loss from the model, which computes it only if the batch has labels under the "
        "name that the model knows.",
        fix="Look at the keys that the message lists: rename the column to `labels`, keep it "
        "(`remove_unused_columns=False` if the forward names differ), or use the data collator of the task.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nValueError: The '
        "model did not return a loss from the inputs, only the following keys: logits. For reference, the inputs "
        "it received are input_ids,attention_mask.",
        seen="text of transformers; not reproduced, it is no dependency",
    ),
    Signature(
        id="H1382",
        title="something that is no module in the place of one",
        family="user code",
        patterns=(
            r"\bis not a Module subclass\b",
            r"\bcannot assign '[\w.<>' ]+' as child module '",
            r"\bcannot assign '[\w.<>' ]+' as buffer '",
            r"\bmodule name can't (?:contain|be)\b|\battribute '\w+' already exists\b",
            r"\bModule(?:List|Dict)(?:\.\w+)? (?:should be called with an iterable|update sequence element)",
        ),
        exceptions=("TypeError", "KeyError"),
        means="`nn.Sequential`, `ModuleList` or an attribute that holds a layer got a function, a class or a "
        "number; or a layer has a name that is taken or has a point in it.",
        fix="Use the module in place of the function (`nn.ReLU()` for `torch.relu`), and an instance in place of "
        "the class (`nn.ReLU()`, not `nn.ReLU`).",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nTypeError: '
        "torch.relu is not a Module subclass",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1386",
        title="a torch function got something else than tensors or sizes",
        family="shape or type",
        rank=74,
        patterns=(
            r"\b\w+\(\): argument '\w+' \(position \d+\) must be (?:\w+ )*(?:Tensors?|Number|ints?|float|bool)\b",
            r"\breceived an invalid combination of arguments - got\b",
            r"\bargument '\w+' failed to unpack the object at pos \d+",
            r"\A(?:TypeError: )?(?:zeros|ones|empty|rand|randn|full)\(\) takes \d+ positional arguments? but",
            r"\b\w+\(\): argument '\w+' must be\b",
            r"\b\w+\(\): argument '\w+' \(position \d+\) must be [\w ]+, (?:but found|not) ",
            r"\bExpected (?:a )?Tensor[^\n]{0,40} but got (?:a )?(?:list|tuple|dict|numpy)",
            r"\b(?:expected Tensor as element \d+ in argument \d+|expected a Tensor but got)\b",
            r"\bexpected np\.ndarray \(got \w+\)",
        ),
        exceptions=("TypeError", "ValueError"),
        means="A layer or function of torch got a numpy array, a list, a tuple or text, or a size that is no whole "
        "number (`16 / 2` is 8.0).",
        fix="Convert first: `torch.from_numpy(x)`, `torch.stack(list_of_tensors)`; unpack tuples of recurrent "
        "layers; use `//` for sizes and `int(...)` for settings.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nTypeError: '
        "linear(): argument 'input' (position 1) must be Tensor, not numpy.ndarray",
        seen="reproduced on torch 2.13",
    ),
)
