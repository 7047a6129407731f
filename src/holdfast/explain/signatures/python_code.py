"""Signatures of plain mistakes in running Python code: names, arguments, keys, types, as they stand in scripts.

They are generic and rank last: whatever says more of the same exception wins.
"""

from __future__ import annotations

from holdfast.explain.signature import Signature

SIGNATURES: tuple[Signature, ...] = (
    Signature(
        id="H992",
        title="recursion without end",
        family="user code",
        patterns=(
            r"\bmaximum recursion depth exceeded\b",
            r"\bCannot recover from stack overflow\b",
            r"\bStack overflow \(used \d+ kB\)",
        ),
        means="A function calls itself too deep: `__getattr__` that uses an attribute which is not set yet, a "
        "property that reads itself, a sample that is replaced by itself, a module inside of itself, or a chain of "
        "thousands of objects that is copied or pickled.",
        fix="The lines that repeat in the traceback are the circle. In `__getattr__` use `self.__dict__` or "
        "`super()`; cut the chain; a higher limit only moves the end, and may crash the interpreter.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nRecursionError: '
        "maximum recursion depth exceeded",
        seen="reproduced on torch 2.13",
        also={
            "python 3.12": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "RecursionError: maximum recursion depth exceeded in comparison",
        },
    ),
    Signature(
        id="H1360",
        title="a key or an index that a sample does not have, inside the dataset",
        family="loader",
        rank=88,
        patterns=(r"(?s)\A.*",),
        exceptions=("KeyError", "IndexError"),
        frames=(
            r"torch/utils/data/_utils/fetch\.py:fetch$",
            r"^(?!.*(?:site-packages|dist-packages|<frozen|[/\\]lib[/\\]python\d)).*:__getitems?__$",
        ),
        only_exceptions=True,
        means="`__getitem__` asked for something that this one sample lacks: an unknown class, a missing "
        "annotation, a column with another name, or an index past the end, since `__len__` promises more than "
        "there is.",
        fix="Find the index: run `dataset[i]` in a loop without workers and print `i` when it fails. Check "
        "`__len__`, then mend or drop such samples when the list is made. `holdfast` can set single bad samples "
        "aside.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n  File '
        '".venv/lib/python3.11/site-packages/torch/utils/data/_utils/fetch.py", line 54, in fetch\n  File '
        "\"data.py\", line 17, in __getitem__\nKeyError: 'Dog'",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1365",
        title="a call with arguments that the function does not take",
        family="user code",
        rank=85,
        patterns=(
            (
                r"(?:\b\w+|>)\(\) (?:missing \d+ required (?:positional|keyword-only) arguments?|got an unexpected "
                r"keyword argument|got (?:some )?multiple values for (?:keyword )?argument|takes (?:from )?\d+ "
                r"(?:to \d+ )?positional arguments? but \d+ (?:positional arguments? .{0,60})?(?:was|were) given|"
                r"takes (?:no|exactly \w+|at (?:most|least) \w+) arguments?|got some positional-only arguments)"
            ),
            r"\bgot multiple values for (?:keyword )?argument '",
            r"\b\w+\(\) takes no (?:keyword )?arguments",
        ),
        exceptions=("TypeError",),
        only_exceptions=True,
        means="An argument is missing, unknown or given twice: a forgotten `self`, a setting that the class does "
        "not have, or an argument that a library removed (`verbose` of the schedulers).",
        fix="Compare the call in the last own line of the traceback with the definition; "
        "`inspect.signature(function)` prints it. After an update of a library read its release notes.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nTypeError: '
        "Net.__init__() got an unexpected keyword argument 'dropout'",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1366",
        title="an attribute or method that the object does not have",
        family="user code",
        rank=88,
        patterns=(
            r"'[\w.]+' object has no attribute '\w+'",
            r"\btype object '[\w.]+' has no attribute '\w+'",
            r"\bmodule '[\w.]+' has no attribute '\w+'",
            r"'(?:super|\w+)' object has no (?:setter|deleter)|\bcan't set attribute\b",
            r"\b[\w.]+ has no attribute `\w+`",
        ),
        exceptions=("AttributeError",),
        only_exceptions=True,
        means="The name is misspelt or never set in `__init__`, or the object is another than was thought: a list "
        "for a tensor, a tuple for the output of a recurrent layer, a wrapper (DataParallel, compiled) for the "
        "model.",
        fix="Print `type(x)`. Behind a wrapper use `model.module`; unpack tuples (`output, state = lstm(x)`); look "
        "for the right spelling in `dir(x)`.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n  File '
        '".venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1964, in __getattr__\n'
        "AttributeError: 'Net' object has no attribute 'fcl'. Did you mean: 'fc1'?",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1367",
        title="None where an object was expected",
        family="user code",
        rank=86,
        patterns=(
            (
                r"'NoneType' object (?:has no attribute|is not (?:subscriptable|iterable|callable|an iterator)|"
                r"does not support item assignment|cannot be interpreted as an integer)"
            ),
            r"\bcannot unpack non-iterable NoneType object\b",
            r"\bobject of type 'NoneType' has no len\(\)",
            r"\bargument of type 'NoneType' is not (?:iterable|a container)",
            r"\bunsupported operand type\(s\) for [^\n]{1,12}: (?:'NoneType' and|'[\w.]+' and 'NoneType')",
            r"\bmust be Tensor, not NoneType\b",
        ),
        exceptions=("AttributeError", "TypeError"),
        only_exceptions=True,
        means="A variable is `None`: a function or `forward` without `return`, an optional object that was not "
        "made (a schedule), a reader or a pattern that found nothing.",
        fix="Go from the last own line of the traceback to where the variable is set. Add the missing `return`; "
        "test for `None` where it is allowed.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nAttributeError: '
        "'NoneType' object has no attribute 'step'",
        seen="reproduced on torch 2.13",
        also={
            "index": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nTypeError: '
            "'NoneType' object is not subscriptable",
        },
    ),
    Signature(
        id="H1368",
        title="a name that is not defined",
        family="user code",
        rank=85,
        patterns=(
            r"\bname '\w+' is not defined\b",
            (
                r"\b(?:cannot access )?(?:local|free) variable '\w+'[^\n]{0,40}(?:referenced before assignment|"
                r"where it is not associated with a value)"
            ),
            r"\bcannot access free variable '\w+'",
        ),
        exceptions=("NameError", "UnboundLocalError"),
        only_exceptions=True,
        means="A name is misspelt or its import is missing; or it is set only in a branch or loop that did not "
        "run, such as over an empty loader.",
        fix="Check the spelling and the imports; set a first value before the loop. A linter (`ruff check`, "
        "`pyflakes`) finds these before the start.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nNameError: name '
        "'np' is not defined",
        seen="reproduced on torch 2.13",
        also={
            "python 3.11": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "UnboundLocalError: cannot access local variable 'loss' where it is not associated with a value",
        },
    ),
    Signature(
        id="H1369",
        title="an operation on a value of the wrong type",
        family="user code",
        rank=88,
        patterns=(
            r"\bunsupported operand type\(s\) for ",
            r"'(?:<|>|<=|>=)' not supported between instances of ",
            r"'[\w.]+' object is not (?:callable|iterable|subscriptable|reversible|an iterator)",
            r"'[\w.]+' object (?:does not support item (?:assignment|deletion)|cannot be interpreted as an integer)",
            r"\bunhashable type: '",
            r'\bcan only concatenate \w+ \(not "',
            r"\bmust be (?:str|real number|a string|int|an integer|numeric|bytes)(?:,| or)[^\n]{0,60}\bnot ",
            r"\b(?:list|tuple|string|byte) indices must be integers",
            r"\bcan't multiply sequence by non-int of type\b",
            r"\bobject of type '[\w.]+' has no len\(\)",
            r"\bsequence item \d+: expected \w+ instance",
            (
                r"\bint\(\) argument must be\b|\bfloat\(\) argument must be\b|\bargument of type '[\w.]+' is not "
                r"(?:iterable|a container)\b|\bcannot unpack non-iterable\b|\bbad operand type for unary\b|"
                r"\bexpected str, bytes or os\.PathLike object, not\b"
            ),
            r"\bbad operand type for abs\(\)|\bdoesn't define __round__ method",
        ),
        exceptions=("TypeError",),
        only_exceptions=True,
        means="A number is text (from YAML, the command line or the environment), a number is iterated, a module "
        "or a property is called, a tuple is changed.",
        fix="Print `type(x)` before the line; convert settings where they are read (`float(...)`, `int(...)`). "
        "`1e-4` is text in YAML, `1.0e-4` a number.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nTypeError: '
        "unsupported operand type(s) for /: 'str' and 'int'",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1370",
        title="another number of values than names to unpack them into",
        family="user code",
        rank=85,
        patterns=(r"\b(?:too many|not enough) values to unpack \(expected (?:at least )?\d+",),
        exceptions=("ValueError",),
        only_exceptions=True,
        means="A batch, a shape or a line has more or fewer parts than names on the left: a loader that yields "
        "three things, a gray picture without channels, a line without its second column.",
        fix="Print `len(x)` or the value itself before the line, and name all parts (`image, label, *rest = batch`).",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nValueError: too '
        "many values to unpack (expected 2)",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1371",
        title="a key that a dictionary does not have",
        family="user code",
        rank=90,
        patterns=(r"(?s)\A.*",),
        exceptions=("KeyError",),
        only_exceptions=True,
        means="A setting, a model or a metric was asked for under a name that is not there: misspelt, never "
        "stored, or in another level of the settings.",
        fix="Print `list(d)` of the dictionary in the last own line of the traceback; correct the name or add the "
        "entry.",
        example="Traceback (most recent call last):\n  File \"train.py\", line 41, in <module>\nKeyError: 'depth'",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1372",
        title="an index past the end",
        family="user code",
        rank=90,
        patterns=(
            r"\b(?:list|tuple|string|bytearray|range object|deque|array) (?:assignment )?index out of range\b",
            r"\b(?:pop from (?:an )?empty|no items in)\b",
            r"\bindex -?\d+ is out of range\b",
            r"\bNo such group\b|\bno such group\b",
            r"(?s)\A.",
        ),
        exceptions=("IndexError",),
        only_exceptions=True,
        means="The list has fewer elements than the index says: it is empty, an argument of the command line is "
        "missing, a network has fewer layers, a result fewer parts.",
        fix="Print its length before the line. Ask why it is empty or short before guarding against it.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nIndexError: list '
        "index out of range",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1373",
        title="an assertion of the program does not hold",
        family="user code",
        rank=90,
        patterns=(r"(?s)\A.*",),
        exceptions=("AssertionError",),
        only_exceptions=True,
        means="The author of the code, or of a library, wrote down what must be true here, and it is not.",
        fix="Read the condition in the last line of the traceback and print both of its sides. Do not take it out: "
        "it stands for an assumption that the lines after it need.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nAssertionError: '
        "image size 100 is not divisible by the patch size 16",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1376",
        title="a method that is not written",
        family="user code",
        rank=90,
        patterns=(
            r'\bis missing the required "forward" function\b',
            r"\bCan't instantiate abstract class \w+ with",
            r"\ANotImplementedError(?!:[^\n]{0,20}Could not run)",
        ),
        exceptions=("NotImplementedError", "TypeError"),
        only_exceptions=True,
        means="A class lacks a method that its parent leaves to it: `forward` misspelt or indented into "
        "`__init__`, `__getitem__` of a dataset, an abstract method; or a `ModuleList` is called, which has no "
        "forward.",
        fix="Check the spelling and the indentation of the method in the class that the message names. Loop over a "
        "`ModuleList`, or use `nn.Sequential`.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
        'NotImplementedError: Module [Net] is missing the required "forward" function',
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1388",
        title="a dictionary or set changed inside of the loop over it",
        family="user code",
        rank=82,
        patterns=(
            (
                r"\b(?:dictionary|OrderedDict|Set|deque|list) (?:changed size|keys changed|mutated|modified) "
                r"during iteration\b"
            ),
            r"\bmutated during iteration\b",
        ),
        exceptions=("RuntimeError",),
        only_exceptions=True,
        means="Entries were added or removed while a loop ran over the same object, in this thread or another.",
        fix="Iterate over a copy: `for key in list(d)`; or build a new dictionary.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nRuntimeError: '
        "dictionary changed size during iteration",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1392",
        title="a function refused its arguments",
        family="user code",
        rank=94,
        patterns=(
            (
                r"(?s)\A(?!.{0,2000}(?:CUDA|nccl|cudnn|cublas|HIP error)).{0,2000}?\b(?:expected|expects?|should "
                r"be|should have|must be|must have|must match|has to be|have to be|cannot be|can't be|requires?|"
                r"only supports?)\b[^\n]{0,300}\b(?:got|received|found|not|but)\b"
            ),
            (
                r"(?s)\A(?!.{0,2000}(?:CUDA|nccl|cudnn|cublas|HIP error)).{0,2000}?\b(?:Expected|Unsupported|"
                r"Unrecognized|Unknown|Invalid|invalid|unsupported|unknown|unrecognized) (?:\w+ ){0,4}(?:argument|"
                r"value|option|mode|type|name|size|shape|dtype|choice|key|parameter|nonlinearity|activation|loss|"
                r"model|optimizer|dataset)\b"
            ),
            (
                r"(?s)\A(?!.{0,2000}(?:CUDA|nccl|cudnn|cublas|HIP error)).{0,2000}?\b(?:must|should|has to|have "
                r"to) (?:be|have|match|contain)\b"
            ),
            (
                r"\bis not a(?:n)? (?:valid|allowed|supported) |\b(?:Unknown|Unsupported|Unrecognized|Invalid) [\w "
                r"]{0,40}(?:: |')|\bzip\(\) argument \d+ is (?:longer|shorter)|\b(?:not in|out of) range\b|\bnot "
                r"understood\b|\bdoes(?: not|n't) match\b"
            ),
        ),
        exceptions=("ValueError", "TypeError", "RuntimeError", "IndexError"),
        only_exceptions=True,
        means="A check of the arguments failed: a size, a type or a setting is not what the function takes. The "
        "message says what it expected and what it got.",
        fix="Go to the last own line of the traceback, print what is passed there, and compare it with the message.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nValueError: '
        "reduction='avg' is not valid; it must be one of 'mean', 'sum', 'none'",
        seen="reproduced on torch 2.13",
        also={
            "size": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nRuntimeError: '
            "pack expects a group of 4 values but got 3",
        },
    ),
    Signature(
        id="H1395",
        title="a value that cannot be formatted as the text asks",
        family="user code",
        rank=84,
        patterns=(
            r"\bunsupported format string passed to \w+\.__format__",
            r"\bUnknown format code '",
            r"\bInvalid format specifier\b",
            r"\bnot (?:enough|all) arguments (?:for format string|converted during string formatting)",
            r"%\w format: (?:a real number|an integer|a number|int or char) is required",
            r"\bReplacement index \d+ out of range for positional args tuple",
        ),
        exceptions=("TypeError", "ValueError", "IndexError"),
        only_exceptions=True,
        means="A format such as `:.3f` takes a number. It got a tensor with more than one value, `None` or text; "
        "or the text has more places than there are values.",
        fix="Convert first: `loss.item()`, `float(x)`; for several values `x.tolist()` without a format. Test for "
        "`None` before it is logged.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nTypeError: '
        "unsupported format string passed to Tensor.__format__",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1396",
        title="a value that is not in the list where it is looked for",
        family="user code",
        rank=86,
        patterns=(
            r"\bis not in (?:list|deque|tuple)\b",
            r"\bx not in (?:list|deque|tuple)\b",
            r"\bsubstring not found\b",
            r"\bcontains previously unseen labels\b",
        ),
        exceptions=("ValueError",),
        only_exceptions=True,
        means="`index()`, `remove()` or an encoder of labels met something that it does not know: a class that the "
        "training set lacks, another spelling.",
        fix="Print the value and the list. Build the list of classes from all splits, and unify spelling and types "
        "(`'1'` is not `1`).",
        example="Traceback (most recent call last):\n  File \"train.py\", line 41, in <module>\nValueError: 'fox' "
        "is not in list",
        seen="reproduced on torch 2.13",
        also={
            "scikit-learn": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "ValueError: y contains previously unseen labels: 'fox'",
        },
    ),
)
