"""Signatures of values that cannot be: losses that diverged, matrices without a solution, indices out of range.

NaN that autograd or mixed precision reports lies in ``autograd`` and ``precision``; shapes and dtypes in ``shapes``.
"""

from __future__ import annotations

from holdfast.explain.signature import Signature

SIGNATURES: tuple[Signature, ...] = (
    Signature(
        id="H963",
        title="the loss is not finite: training diverged",
        family="numerics",
        rank=80,
        patterns=(
            (
                r"^(?![^\n]{0,300}(?:\b|_)(?:best|min|lowest|if|when|unless|no|without)(?:\b|_))[^\n]{0,300}(?:\b|"
                r"_)loss(?:es)?\b['\x22]?(?: (?:value|is|was|became|at step \d+))? ?[:=]? ?(?:tensor\( "
                r"?)?[-+]?(?:nan|inf|infinity)\b"
            ),
            (
                r"(?<!if )(?<!when )(?<!unless )(?<!no )\bloss(?:es)?\b[^\n]{0,30} (?:is|are|was|became|got|has|"
                r"with|encountered) (?:a )?(?:value )?(?:nan|infinite|infinity|inf|not finite|non-?finite)\b"
            ),
            (
                r"(?<!if )(?<!when )(?<!unless )(?<!whether )(?<!no )\b(?:outputs?|predictions|logits) (?:"
                r"is|are|became|contains?) (?:all )?nan\b"
            ),
            (
                r"(?<!if )(?<!when )(?<!no )(?<!without )(?<!on )(?<!for )(?<!skip )\b(?:nan|infinite|inf|"
                r"non-?finite)(?:(?: or |/)(?:nan|inf|infinite))? (?:\w+ )?loss(?:es)?\b(?:, (?:stopp|end|abort|"
                r"skipp|exit|terminat)\w*| (?:detected|encountered|found|at|in|during|value|of)\b|[:,]? "
                r"(?:tensor\(|[-+]?(?:nan|inf)\b))"
            ),
        ),
        means="The loss became NaN or infinite. Every later step then writes NaN into the weights, so nothing "
        "after that step is worth keeping.",
        fix="Go back to a checkpoint from before the first such step. Then lower the learning rate or warm it up, "
        "clip gradients, and look at the batch of that step for empty targets, a log or a division by zero. "
        "`holdfast.Guard` skips and rolls back such steps by itself.",
        false_positives="A script that skips such batches prints the same words and goes on; so does a metric of "
        "an empty class.",
        example="Loss is nan, stopping training",
        seen="reproduced on torch 2.13",
        also={
            "Hugging Face Trainer": "{'loss': nan, 'grad_norm': nan, 'learning_rate': 4.9e-05, 'epoch': 0.12}",
            "own check": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "FloatingPointError: loss is NaN at step 812, check the learning rate",
        },
    ),
    Signature(
        id="H964",
        title="a matrix has no factorisation: not finite, singular or ill-conditioned",
        family="numerics",
        patterns=(
            (
                r"\blinalg\.\w+: [^\n]{0,200}(?:not positive-definite|is singular|non-finite values|"
                r"ill-conditioned|failed to converge)"
            ),
            r"\b(?:Singular matrix|(?:SVD|Eigenvalues) did not converge|Matrix is not positive definite)\b",
            r"\b\d+-(?:th|st|nd|rd) leading minor (?:of the array )?(?:is )?not positive definite",
            (
                r"\b(?:cholesky|inverse|solve|lu|svd|symeig)_(?:cpu|cuda): [^\n]{0,80}(?:is zero, singular U|did "
                r"not converge|not positive)"
            ),
            r"\bmatrix (?:is )?(?:exactly )?singular\b",
            r"\binput (?:tensor )?should not contain infs or NaNs\b",
        ),
        exceptions=("LinAlgError", "_LinAlgError", "RuntimeError", "ValueError"),
        means="A Cholesky, inverse, solve, SVD or eigenvalue routine got a matrix for which it has no result: with "
        "NaN or infinity in it, without full rank, or with rounding errors that made it indefinite.",
        fix="Check that the matrix is finite before the call: NaN there comes from earlier. Then add a small "
        "multiple of the identity (1e-6 of the mean diagonal), compute in float64, or use `torch.linalg.lstsq` or "
        "`pinv`.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
        "torch._C._LinAlgError: linalg.cholesky: The factorization could not be completed because the input is not "
        "positive-definite (the leading minor of order 3 is not positive-definite).",
        seen="reproduced on torch 2.13",
        also={
            "numpy": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "numpy.linalg.LinAlgError: Singular matrix",
            "torch 1.8": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "RuntimeError: cholesky_cpu: U(3,3) is zero, singular U.",
        },
    ),
    Signature(
        id="H970",
        title="an index, a token or a label lies outside of its table",
        family="shape or type",
        patterns=(
            r"\bindex out of range in self\b",
            r"\bindex out of range: Tried to access index \d+ out of table with \d+ rows",
            r"\bTarget -?\d+ is out of bounds\b",
            r"\bindex -?\d+ is out of bounds for (?:dimension|axis) \d+ with size \d+",
            r"\bClass values must be (?:smaller than num_classes|non-negative)",
            r"\bindex_select\(\): (?:index out of range|self indexing axis dim should be)",
            r"\bfound idx to be -?\d+",
            r"\bIndex \d+ of input takes value -?\d+ which is not in the valid range",
            r"\bindex -?\d+ is out of range for dimension",
            r"\bindex -?\d+ out of range for tensor of size\b",
            r"\btried to access index -?\d+ on a tensor of \d+ elements",
            r"\bbincount only supports 1-d non-negative integral inputs\b",
            r"\b'list' argument must have no negative elements\b",
        ),
        exceptions=("IndexError", "RuntimeError"),
        means="An embedding got a token not below its size, a loss a label not below the number of classes, or an "
        "index went past the end of a tensor. On a GPU the same mistake shows as a device-side assert.",
        fix="Print minimum and maximum of the indices and compare them with `num_embeddings` or the number of "
        "classes. Usual causes: labels counted from 1, the value 255 for void pixels (pass `ignore_index=255`), a "
        "tokenizer with added tokens (`resize_token_embeddings`), a sequence longer than the position table.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n  File '
        '".venv/lib/python3.11/site-packages/torch/nn/functional.py", line 2567, in embedding\nIndexError: index '
        "out of range in self",
        seen="reproduced on torch 2.13",
        also={
            "label": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nIndexError: '
            "Target 10 is out of bounds.",
            "torch 1.4": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "RuntimeError: index out of range: Tried to access index 10 out of table with 9 rows.",
            "index": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nIndexError: '
            "index 8 is out of bounds for dimension 0 with size 8",
        },
    ),
    Signature(
        id="H972",
        title="binary cross entropy of values outside of 0 to 1",
        family="numerics",
        patterns=(
            r"\ball elements of (?:input|target) should be between 0 and 1\b",
            r"\bAssertion `?input >= 0\. && input <= 1\.'? failed",
        ),
        means="`BCELoss` takes probabilities. It got logits, a target that is not scaled to 0 and 1, or NaN.",
        fix="Use `BCEWithLogitsLoss` on the logits and drop the sigmoid, which is also safer in float16. If there "
        "is a sigmoid already, look for NaN in its input; if it is about the target, scale it.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nRuntimeError: all '
        "elements of input should be between 0 and 1",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1302",
        title="division by zero",
        family="user code",
        rank=85,
        patterns=(
            r"\b(?:division|modulo)(?: or modulo)? by zero\b",
            r"\bdivisor must not be 0\b|\bZeroDivisionError\b",
        ),
        exceptions=("ZeroDivisionError", "RuntimeError", "ValueError"),
        only_exceptions=True,
        means="Python's own arithmetic divided by zero. In training scripts it is mostly a mean over an empty "
        "loader, or a number of steps or of micro-batches that was rounded to zero.",
        fix="Look at the line: what can be zero there? Check `len(loader)` (with `drop_last=True` it may be 0) and "
        "integer divisions of batch sizes.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nZeroDivisionError: '
        "float division by zero",
        seen="reproduced on torch 2.13",
        also={
            "modulo": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "ZeroDivisionError: integer modulo by zero",
        },
    ),
    Signature(
        id="H1303",
        title="a tensor of several values where a single number is needed",
        family="shape or type",
        patterns=(
            r"\ba Tensor with \d+ elements cannot be converted to Scalar\b",
            r"\bBoolean value of Tensor with (?:more than one value|no values) is ambiguous\b",
            r"\bonly one element tensors can be converted to Python scalars\b",
            r"\bonly integer tensors of a single element can be converted to an index\b",
            (
                r"\bThe truth value of an? (?:empty )?(?:array|Series|DataFrame)(?: with (?:more than one|no) "
                r"elements?)? is ambiguous\b"
            ),
            r"\bonly (?:length-1|0-dimensional|size-1) arrays can be converted to Python scalars\b",
            r"\bonly integer scalar arrays can be converted to a scalar index\b",
            r"\bcan only convert an array of size 1 to a Python scalar\b",
        ),
        means="`if`, `float()`, `int()`, `.item()` or `range()` got a tensor with more than one value, or with none.",
        fix="Reduce it first: `.mean()`, `.sum()`, `.all()`, `.any()`, or pick one element. A loss with "
        "`reduction='none'` has one value for each sample.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nRuntimeError: a '
        "Tensor with 4 elements cannot be converted to Scalar",
        seen="reproduced on torch 2.13",
        also={
            "condition": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "RuntimeError: Boolean value of Tensor with more than one value is ambiguous",
        },
    ),
    Signature(
        id="H1304",
        title="text or objects given to torch.tensor",
        family="shape or type",
        patterns=(
            r"\btoo many dimensions '\w+'",
            r"\bnew\(\): invalid data type '\w+'",
            r"\bCould not infer dtype of ",
        ),
        exceptions=("TypeError", "ValueError", "RuntimeError"),
        means="A tensor holds numbers. It got strings, dictionaries, `None` or other objects, alone or in a list.",
        fix="Print the type of the elements. Map class names to numbers, take the field that is meant out of each "
        "record, drop or fill missing values.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nValueError: too '
        "many dimensions 'str'",
        seen="reproduced on torch 2.13",
        also={
            "record": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "RuntimeError: Could not infer dtype of dict",
        },
    ),
    Signature(
        id="H1305",
        title="a draw, a range or a maximum over nothing",
        family="user code",
        rank=75,
        patterns=(
            r"\bCannot choose from an empty (?:sequence|population)\b",
            r"\bempty range (?:for|in) rand(?:range|int)\(",
            r"\brandom_ expects 'from' to be less than 'to'",
            r"\b(?:max|min)\(\)(?: arg is an empty sequence|(?: iterable)? argument is empty)",
            (
                r"\b(?:max|min|amax|amin|argmax|argmin)\(\): Expected reduction dim [^\n]{0,80}(?:numel\(\) == 0|"
                r"non-zero size)"
            ),
            (
                r"\ba must be greater than 0 unless no samples are taken\b|\b'a' cannot be empty unless no samples "
                r"are taken\b"
            ),
            r"\bzero-size array to reduction operation \w+ which has no identity\b",
            r"\battempt to get arg(?:max|min) of an empty sequence\b",
            r"\blow >= high\b",
            r"\bexpected a non-empty list of Tensors\b|\bexpects a non-empty (?:TensorList|list)\b",
            r"'a' cannot be empty unless no samples are taken",
            r"\bInvalid number of data points \(0\)",
            r"\bneed at least one array to (?:concatenate|stack)\b",
        ),
        means="A sample was drawn from, or a maximum taken over, a list or tensor without elements, or a random "
        "position from an empty range: a crop larger than the picture, a clip shorter than the window.",
        fix="See what made it empty: a filter, a wrong path, a short sample, a buffer that is not filled yet. Then "
        "leave such samples out, or pad them, before this line.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n  File '
        '"/usr/lib/python3.11/random.py", line 374, in choice\nIndexError: Cannot choose from an empty sequence',
        seen="reproduced on torch 2.13",
        also={
            "torch": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nRuntimeError: '
            "max(): Expected reduction dim to be specified for input.numel() == 0. Specify the reduction dim with "
            "the 'dim' argument.",
        },
    ),
    Signature(
        id="H1397",
        title="data or labels that scikit-learn does not take",
        family="user code",
        rank=68,
        patterns=(
            r"\bFound input variables with inconsistent numbers of samples\b",
            r"\bThis \w+ instance is not fitted yet\b",
            r"\bneeds samples of at least 2 classes in the data\b",
            (
                r"\b(?:Classification metrics can't handle a mix of|Target is multiclass but average=|Only one "
                r"class present in y_true)"
            ),
            r"\bThe least populated class(?:es)? in y ha[sv]e? only \d+ member",
            r"\bthe resulting train set will be empty\b",
            r"\bExpected 2D array, got (?:1D|scalar) array instead\b",
            r"\bX has \d+ features, but \w+ is expecting \d+ features",
        ),
        exceptions=("ValueError", "NotFittedError"),
        means="A metric or an estimator got labels and predictions of different lengths or kinds, one class only, "
        "no samples, or other features than it was fitted with.",
        fix="Print the shapes and `numpy.unique` of both sides. Give class numbers (`argmax`) to metrics of "
        "classes and probabilities to ranking metrics; fit before you transform.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nValueError: Found '
        "input variables with inconsistent numbers of samples: [2, 1]",
        seen="reproduced with scikit-learn 1.9",
    ),
)
