"""Signatures of values that are not finite, of random draws, and of results that differ.

Read through ``precision``. Does not match anything.
"""

from __future__ import annotations

from holdfast.explain.signature import Signature

_SEEN = "reproduced on torch 2.13"

_NONFINITE: tuple[Signature, ...] = (
    Signature(
        id="H959",
        title="the norm of the gradients is not finite",
        family="numerics",
        patterns=(r"norm of order \S+ for (?:a |the )?gradients? from `parameters` is non-finite",),
        means="At least one gradient is NaN or infinite: a root or logarithm at 0, a division by 0, an overflow in "
        "float16, or a bad batch.",
        fix="Find the source with torch.autograd.detect_anomaly() on the same batch, and guard it by an epsilon. "
        "Single steps of this kind may be skipped.",
        example="RuntimeError: The total norm of order 2.0 for gradients from `parameters` is non-finite, so it "
        "cannot be clipped. To disable this error and scale the gradients by the non-finite norm anyway, "
        "set `error_if_nonfinite=False`",
        seen=_SEEN,
        also={
            "torch 1.8": "RuntimeError: The norm of order 2.0 for a gradient from `parameters` is non-finite, so it "
            "cannot be clipped. This error can be disabled with `error_if_nonfinite=False`",
        },
    ),
    Signature(
        id="H960",
        title="anomaly mode found the operation that makes NaN in backward",
        family="numerics",
        patterns=(r"Function '\w+' returned nan values in its \d+th output",),
        means="The named operation has a NaN gradient: sqrt, norm or pow at 0, log of 0, 0/0. torch.where does not "
        "help, since the other branch is differentiated too.",
        fix="The traceback above it, 'Traceback of forward call', names the line. Add an epsilon inside the root or "
        "logarithm, or replace the input before the operation.",
        example="RuntimeError: Function 'MulBackward0' returned nan values in its 0th output.",
        seen=_SEEN,
        also={
            "torch 1.4": "RuntimeError: Function 'SqrtBackward' returned nan values in its 0th output.",
        },
    ),
    Signature(
        id="H961",
        title="probabilities to draw from are NaN, infinite or negative",
        family="numerics",
        patterns=(
            r"probability tensor contains either `inf`, `nan` or element < 0",
            r"invalid multinomial distribution \(encountering",
        ),
        means="The logits were NaN or infinite before softmax: diverged weights, a temperature of 0, a row that is "
        "masked entirely, or an overflow in float16.",
        fix="Check the logits with isfinite before sampling. In float16 compute softmax in float32, and clamp the "
        "temperature.",
        example="RuntimeError: probability tensor contains either `inf`, `nan` or element < 0",
        seen=_SEEN,
        also={
            "torch 1.x, CPU": "RuntimeError: invalid multinomial distribution (encountering probability entry < 0)",
        },
    ),
    Signature(
        id="H962",
        title="a distribution was given invalid parameters, mostly NaN",
        family="numerics",
        patterns=(
            r"to satisfy the constraint .{1,200}, but found invalid values",
            r"(?:Expected value argument .{1,200} to|The value argument must) be within the support",
            r"The parameter \w+ has invalid values",
            r"`\w+` parameter must be at least one-dimensional",
            r"Either `\w+` or `\w+` must be specified, but not both",
        ),
        means="A parameter or value of a torch distribution lies outside its domain. NaN in the message means that "
        "the network diverged; otherwise a scale is not positive, or logits were taken for probabilities.",
        fix="For NaN see the step before. Use softplus or exp plus an epsilon for scales, and logits=... for raw "
        "outputs.",
        example="ValueError: Expected parameter logits (Tensor of shape (2, 3)) of distribution "
        "Categorical(logits: torch.Size([2, 3])) to satisfy the constraint IndependentConstraint(Real(), "
        "1), but found invalid values:\n"
        "tensor([[nan, nan, nan],\n        [nan, nan, nan]])",
        seen=_SEEN,
        also={
            "torch 1.7": "ValueError: The parameter loc has invalid values",
            "torch 1.7, a value": "ValueError: The value argument must be within the support",
        },
    ),
    Signature(
        id="H1281",
        title="NumPy was told to raise on overflow or invalid values",
        family="numerics",
        exceptions=("FloatingPointError",),
        patterns=(r"(?:overflow|underflow|divide by zero|invalid value) encountered in \w+",),
        only_exceptions=True,
        means="A NumPy operation gave NaN or infinity, and np.seterr or np.errstate turns that into an error.",
        fix="Guard the operation: subtract the maximum before exp, add an epsilon to a standard deviation.",
        example='Traceback (most recent call last):\n  File "/app/train.py", line 509, in '
        "numpy_raises_on_overflow\n"
        "FloatingPointError: overflow encountered in exp",
        seen="reproduced on NumPy 2",
    ),
    Signature(
        id="H1290",
        title="a plain Python function left its domain",
        family="numerics",
        only_exceptions=True,
        exceptions=("OverflowError", "ValueError"),
        patterns=(
            r"math range error",
            r"math domain error",
            r"expected a (?:positive|nonnegative) input",
            r"\(34, 'Numerical result out of range'\)",
        ),
        means="math.exp of a large loss (a perplexity), or math.log or math.sqrt of 0 or less.",
        fix="Limit the argument, math.exp(min(loss, 20)), or use torch functions, which give inf.",
        example='Traceback (most recent call last):\n  File "/app/train.py", line 672, in '
        "perplexity_of_a_diverged_loss\n"
        "OverflowError: math range error",
        seen="reproduced on Python 3.11",
        also={
            "Python 3.14": 'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n'
            "ValueError: expected a positive input",
        },
    ),
    Signature(
        id="H1291",
        title="NaN or infinity is turned into a whole number",
        family="numerics",
        patterns=(r"cannot convert float (?:NaN|infinity) to integer",),
        means="int() or round() of a loss or a mean that is not finite.",
        fix="The cause is where the value became NaN: stop there with math.isfinite(loss).",
        example="ValueError: cannot convert float NaN to integer",
        seen="reproduced on Python 3.11",
    ),
    Signature(
        id="H1292",
        title="a metric or model of another library got NaN or infinity",
        family="numerics",
        patterns=(
            r"Input (?:\w+ )?contains (?:NaN|infinity)",
            r"array must not contain infs or NaNs",
            r"range of \[.{1,80}\] is not finite",
            r"Axis limits cannot be NaN or Inf",
        ),
        exceptions=("ValueError",),
        means="The predictions or features are not finite. The library only noticed it first.",
        fix="Check np.isfinite(predictions).all() and look for the step or sample at which it began.",
        example="ValueError: Input contains NaN.",
        seen=_SEEN + " with scikit-learn 1.7",
    ),
)

_CHANCE: tuple[Signature, ...] = (
    Signature(
        id="H1284",
        title="all probabilities to draw from are zero",
        family="numerics",
        patterns=(r"invalid multinomial distribution \(sum of probabilities <= 0\)",),
        means="Everything was masked, or the weights of all classes are 0.",
        fix="Leave at least one choice unmasked; skip rows without any.",
        example="RuntimeError: invalid multinomial distribution (sum of probabilities <= 0)",
        seen=_SEEN,
    ),
    Signature(
        id="H1285",
        title="more draws without replacement than there are choices",
        family="user code",
        patterns=(
            r"invalid multinomial distribution \(with replacement=False, not enough",
            r"cannot sample n_sample > prob_dist\.size\(-1\) samples without replacement",
            r"Cannot take a larger sample than population when",
            r"Sample larger than population or is negative",
        ),
        means="num_samples exceeds the number of entries, or a vocabulary is smaller than k.",
        fix="Use replacement=True, or min(k, choices).",
        example="RuntimeError: cannot sample n_sample > prob_dist.size(-1) samples without replacement",
        seen=_SEEN,
        also={
            "torch 1.5": "RuntimeError: invalid multinomial distribution (with replacement=False, not enough "
            "non-negative category to sample)",
        },
    ),
    Signature(
        id="H1286",
        title="a parameter of a random operation lies outside its range",
        family="user code",
        patterns=(
            r"normal expects (?:all elements of )?std >= 0\.0",
            r"(?:bernoulli_|dropout|geometric_|exponential_|log_normal_|uniform_|cauchy_) expects? ",
            r"dropout probability has to be between 0 and 1, but got",
            r"dropout should be a number in range \[0, 1\]",
            r"invalid Poisson rate, expected rate to be non-negative",
            r"Expected p_in >= 0 && p_in <= 1",
        ),
        means="A probability is below 0 or above 1 (percent for a share, or logits for probabilities), a deviation "
        "is negative, or limits are swapped.",
        fix="Print the value. Use sigmoid for logits, and exp or softplus for deviations.",
        false_positives="NaN gives the same texts.",
        example="ValueError: dropout probability has to be between 0 and 1, but got 20",
        seen=_SEEN,
    ),
    Signature(
        id="H1282",
        title="a comparison of tensors or arrays failed",
        family="numerics",
        patterns=(
            r"Tensor-likes are not (?:close|equal)!",
            r"Scalars are not (?:close|equal)!",
            r"The values for attribute '\w+' do not match:",
            r"Arrays are not (?:almost )?equal",
            r"Not equal to tolerance rtol=",
        ),
        exceptions=("AssertionError",),
        means="A check of equal results did not hold: another precision, an order of sums, dropout left on, or a "
        "real difference.",
        fix="Look at the greatest difference in the message. Up to 1e-6 (float32) or 1e-2 (bfloat16) is rounding.",
        example="AssertionError: Tensor-likes are not close!",
        seen=_SEEN,
    ),
    Signature(
        id="H1283",
        title="an operation is not deterministic, and that was forbidden",
        family="numerics",
        patterns=(r"does not have a deterministic implementation, but you set",),
        means="torch.use_deterministic_algorithms(True) refuses operations whose result depends on the order of "
        "threads, or on memory that was not set.",
        fix="Replace the operation, or pass warn_only=True.",
        example="RuntimeError: put_ does not have a deterministic implementation, but you set "
        "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this "
        "operation, or you can use the 'warn_only=True' option, if that's acceptable for your "
        "application. You can also file an issue at https://github.com/pytorch/pytorch/issues to help us "
        "prioritize adding deterministic support for this operation.",
        seen=_SEEN,
    ),
    Signature(
        id="H1293",
        title="deterministic matrix products on CUDA need a variable that is not set",
        family="environment",
        restart="remedy",
        changes={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        patterns=(r"this operation is not deterministic because it uses CuBLAS",),
        means="With torch.use_deterministic_algorithms(True) cuBLAS must use workspaces of a fixed size.",
        fix="Set CUBLAS_WORKSPACE_CONFIG=:4096:8 before the program starts.",
        example="RuntimeError: Deterministic behavior was enabled with either "
        "`torch.use_deterministic_algorithms(True)` or `at::Context::setDeterministicAlgorithms(true)`, but this "
        "operation is not deterministic because it uses CuBLAS and you have CUDA >= 10.2.",
        seen="needs a GPU, not reproduced here",
    ),
)

SIGNATURES: tuple[Signature, ...] = (*_NONFINITE, *_CHANCE)
"""Every signature of values that are not finite, and of chance."""
