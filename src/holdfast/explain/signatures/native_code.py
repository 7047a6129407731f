"""Signatures of compiled code: libraries that are missing or do not fit, crashes, compilers.

Aborts and signals without a text of their own lie in ``runtime``.
"""

from __future__ import annotations

from holdfast.explain.signature import Signature

SIGNATURES: tuple[Signature, ...] = (
    Signature(
        id="H989",
        title="a shared library is missing",
        family="environment",
        patterns=(
            r"\A(?![^\n]{0,400}dlerror)[^\n]{0,400}\.so(?:\.[\d.]+)?: cannot open shared object file: No such file",
            r"\berror while loading shared libraries: ",
            r"\bDLL load failed\b",
            r"\b(?:Unable|failed) to (?:find|load) (?:library|lib)\b",
            r"\b(?:sndfile|cairo|magic|geos)\w* library not found\b",
        ),
        means="A compiled package wants a library that is not on this system, or of another version: often CUDA 11 "
        "against CUDA 12, or a system package that the container lacks.",
        fix="Look which package wants it (the traceback), and reinstall that package for the installed torch and "
        "CUDA. For a system library install its package (`libsndfile1`, `libgl1`); `ldd FILE.so | grep 'not "
        "found'` lists all that is missing.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nOSError: '
        "libcudart.so.11.0: cannot open shared object file: No such file or directory",
        seen="reproduced on torch 2.13",
        also={
            "import": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nImportError: '
            "libGL.so.1: cannot open shared object file: No such file or directory",
            "program": "python: error while loading shared libraries: libpython3.10.so.1.0: cannot open shared "
            "object file: No such file or directory",
        },
    ),
    Signature(
        id="H991",
        title="native code crashed: segmentation fault",
        family="crash",
        rank=45,
        patterns=(
            r"^Fatal Python error: Segmentation fault",
            r"^(?:\S+: line \d+:\s+\d+ )?Segmentation fault(?: {2,}\S.*|\s*\(core dumped\).*)?$",
            r"\bSegmentation fault\s+\(core dumped\)",
            (
                r"\bexited on signal 11\b|\bSIGSEGV\b[^\n]{0,60}(?:received|caught|Segmentation)|\*\*\* (?:Process "
                r"received signal|SIGSEGV)"
            ),
            r"\bSegmentation fault(?: \(11\)| \(signal 11\))",
        ),
        means="Compiled code touched memory that is not its own: a bug in an extension or a library, two packages "
        "that bring different versions of one library, or a stack that overflowed.",
        fix="Read the Python stack (`PYTHONFAULTHANDLER=1` prints it): it names the call. Update or reinstall that "
        "package for the installed torch; import it before or after torch; if it is in a dataset, find the sample. "
        "If memory was short on a CPU and the stack ends in a convolution, oneDNN may have "
        "gone on without a kernel: make the batch smaller, or call torch.backends.mkldnn.set_flags(False). "
        "Retrying alone helps seldom.",
        example="Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f2b1c5fe740 (most recent call "
        'first):\n  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at\n  File "train.py", '
        "line 41 in <module>",
        seen="reproduced on torch 2.13",
        also={
            "shell": "Segmentation fault (core dumped)",
            "bash": "./train.sh: line 3:  4711 Segmentation fault      (core dumped) python train.py",
        },
    ),
    Signature(
        id="H1342",
        title="native code ended itself: damaged heap or an exception that nobody caught",
        family="crash",
        rank=45,
        patterns=(
            (
                r"\b(?:free|malloc|realloc|munmap_chunk|malloc_consolidate|_int_free|unlink|calloc)(?:_\w+)?\(\)?: "
                r"(?:invalid|double free|corrupted|unaligned|mismatching|unsorted|memory corruption|smallbin|"
                r"largebin)[^\n]{0,80}"
            ),
            r"\bdouble free or corruption \(",
            r"\bcorrupted (?:size vs\. prev_size|double-linked list|unsorted chunks)",
            r"\bterminate called (?:without an active exception|recursively)",
            r"\bterminate called after throwing an instance of '(?!std::bad_alloc)",
            r"\bpure virtual method called\b",
            r"\*\*\* (?:stack smashing|buffer overflow) detected \*\*\*",
            r"\blibc\+\+abi: terminating\b",
        ),
        means="A library found its heap damaged, or a C++ exception reached the top of a thread, and called "
        "`abort`. Mostly it is a bug of an extension or a mixture of versions; the place that crashed is often not "
        "the place that did the damage.",
        fix="Read the exception after `what():` if there is one. Run with `PYTHONFAULTHANDLER=1` for the Python "
        "stack; reinstall the extension for the installed torch; leave out other allocators (`LD_PRELOAD`).",
        false_positives="`terminate called after throwing ... c10::Error` at the end of a process whose real "
        "exception stands above.",
        example="free(): double free detected in tcache 2",
        seen="reproduced on torch 2.13",
        also={
            "glibc": "double free or corruption (out)",
            "C++": "terminate called after throwing an instance of 'std::runtime_error'\n  what():  invalid "
            "configuration",
        },
    ),
    Signature(
        id="H1357",
        title="a compiled library that is damaged or built for another version",
        family="environment",
        patterns=(
            r"\bundefined symbol: \w+",
            r"\bversion `?(?:GLIBC|GLIBCXX|CXXABI|GOMP|OPENSSL)_[\d.]+'? not found",
            r"\binvalid ELF header\b",
            r"\bCould not load this library: ",
            r"\bELF file(?:'s phentsize not the expected size| version does not match current one| OS ABI invalid)",
            r"\bfile too short\b",
            r"\bwrong ELF class\b",
            r"\bnumpy\.(?:dtype|ndarray|ufunc) size changed, may indicate binary incompatibility",
            r"\bA module that was compiled using NumPy 1\.x cannot be run in\b",
            r"\b(?:numpy\.core\.multiarray|numpy\._core\.multiarray) failed to import\b",
            r"\bmodule compiled against A(?:BI|PI) version\b",
            r"\bDetected that PyTorch and \w+ were compiled with different CUDA versions\b",
            r"\boperator \S+::\S+ does not exist\b",
            r"\b(?:only ET_DYN and ET_EXEC can be loaded|ELF load command|cannot dynamically load)\b",
        ),
        exceptions=("ImportError", "OSError", "RuntimeError", "ValueError", "AttributeError"),
        means="A shared library was built against another torch, numpy, C++ library or CUDA, or its file is cut "
        "off or a pointer of git LFS.",
        fix="Reinstall that package for the installed torch (same index of wheels, no old build cache: `pip "
        "install --no-cache-dir --force-reinstall`), or build it again. torch, torchvision and torchaudio must be "
        "releases of the same date.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nImportError: '
        "flash_attn_2_cuda.cpython-311-x86_64-linux-gnu.so: undefined symbol: "
        "_ZN3c105ErrorC2ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE",
        seen="text of a wheel that was built for another torch; the other texts reproduced on torch 2.13",
        also={
            "header": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nOSError: '
            "./ops.so: invalid ELF header",
            "numpy": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nValueError: '
            "numpy.dtype size changed, may indicate binary incompatibility. Expected 96 from C header, got 88 from "
            "PyObject",
            "torchvision": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "RuntimeError: operator torchvision::nms does not exist",
        },
    ),
    Signature(
        id="H1359",
        title="a custom operator or kernel cannot be compiled",
        family="environment",
        patterns=(
            r"\bError (?:building extension|compiling objects for extension)\b",
            r"\bNinja is required to load C\+\+ extensions\b",
            r"\bCUDA_HOME environment variable is not set\b",
            r"\bcommand '[\w/.+-]{1,200}' failed(?: with exit (?:status|code) \d+|: No such file)",
            r"\bThe detected CUDA version \([\d.]+\) mismatches the version that was used to compile\b",
            r"\bNo such file or directory: '(?:c\+\+|g\+\+|gcc|cc|nvcc|ninja|which)'",
        ),
        means="A compiler, ninja, the headers of Python or the CUDA toolkit are missing, the toolkit is of another "
        "version than torch, or the source has an error.",
        fix="Read the first line with `error:` above. Install the compiler, `ninja` and the CUDA toolkit of the "
        "version of torch, set `CUDA_HOME`, and build once before the job starts so that ranks do not all compile.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nOSError: CUDA_HOME '
        "environment variable is not set. Please set it to your CUDA install root.",
        seen="reproduced on torch 2.13",
        also={
            "build": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nRuntimeError: '
            "Error building extension 'broken'",
        },
    ),
)
