"""Signatures of memory that ran out: on the GPU, in its libraries, on the host.

Faults of a device that is wrong or broken lie in ``devices``; shared memory of loader workers in ``loading``.
"""

from __future__ import annotations

from holdfast.explain.signature import Signature

# One retry with segments that can grow: CUDA notes of torch, "Optimizing memory usage".
_EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
# Large blocks then go back to the system when they are freed; without it recovery on the CPU fails (runtime.md §6).
_RETURNING = {"MALLOC_MMAP_THRESHOLD_": "4194304"}

_HELD = r"\b[^\n]{0,400}? and "
_UNUSED = r"\.\d+ GiB is reserved by PyTorch but unallocated"
# What is held and unused exceeds what was asked for: compared digit by digit, since a pattern cannot subtract.
_FRAGMENTS = (
    rf"Tried to allocate [\d.]+ [KM]iB{_HELD}\d+{_UNUSED}",
    *(rf"Tried to allocate [0-{most}]\.\d+ GiB{_HELD}{most + 1}{_UNUSED}" for most in range(1, 9)),
    rf"Tried to allocate \d\.\d+ GiB{_HELD}\d\d+{_UNUSED}",
    (
        r"Tried to allocate [\d.]+ [KM]iB \(GPU \d+;[^\n]{0,80}? [\d.]+ [KM]iB already allocated;[^\n]{0,40}? "
        r"(?:[2-9]|\d\d+)\.\d+ GiB reserved in total"
    ),
)

SIGNATURES: tuple[Signature, ...] = (
    Signature(
        id="H901",
        title="GPU memory is full",
        family="out of memory",
        rank=20,
        patterns=(
            r"\b(?:CUDA|HIP|XPU) out of memory\. Tried to allocate",
            r"\bAllocation on device \d* ?would exceed allowed memory",
            r"\bcuda runtime error \(2\) : out of memory",
        ),
        # In the middle of a step the context is there already: it is the training that needs more.
        in_frames=((r"^CUDA error: out of memory\b", r":(?:backward|forward|_call_impl)$|/optim/\w+\.py:step$"),),
        restart="remedy",
        changes=_EXPANDABLE,
        means="The caching allocator of torch found no free block on the GPU and got none from the driver. "
        "Activations of the batch take most of it, and grow with batch size, sequence length and image size.",
        fix="Make the micro-batch smaller and accumulate gradients, or recompute activations (`holdfast.Guard` does "
        "both by itself). Then look for losses or outputs that are kept in a list, and for other processes in "
        "`nvidia-smi`.",
        false_positives="A script that catches the error and goes on with a smaller batch prints the same line.",
        example="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.00 MiB. GPU 0 has a total "
        "capacity of 23.65 GiB of which 11.06 MiB is free. Including non-PyTorch memory, this process has 23.60 GiB "
        "memory in use. Of the allocated memory 22.90 GiB is allocated by PyTorch, and 194.87 MiB is reserved by "
        "PyTorch but unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.",
        seen="pytorch#16417",
        also={
            "torch 1.9, pytorch#59778": "RuntimeError: CUDA out of memory. Tried to allocate 2.26 GiB (GPU 0; 6.00 "
            "GiB total capacity; 781.59 MiB already allocated; 3.03 GiB free; 1.24 GiB reserved in total by PyTorch)",
            "torch 1.0, pytorch#16417": "RuntimeError: CUDA out of memory. Tried to allocate 12.50 MiB (GPU 0; "
            "10.92 GiB total capacity; 8.57 MiB already allocated; 9.28 GiB free; 4.68 MiB cached)",
        },
    ),
    Signature(
        id="H902",
        title="GPU memory is in fragments: enough is reserved, no block is large enough",
        family="out of memory",
        rank=19,
        patterns=_FRAGMENTS,
        restart="remedy",
        changes=_EXPANDABLE,
        means="The allocator holds more free memory than was asked for, but in pieces that are each too small. Sizes "
        "that change from step to step (sequence length, last batch) cut the blocks up.",
        fix="Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True. Then round lengths up to a few sizes (buckets), "
        "and keep `torch.cuda.empty_cache()` for the border between training and evaluation.",
        example="torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total "
        "capacty of 23.65 GiB of which 1.66 GiB is free. Including non-PyTorch memory, this process has 20.81 GiB "
        "memory in use. Of the allocated memory 12.09 GiB is allocated by PyTorch, and 4.84 GiB is reserved by "
        "PyTorch but unallocated. If reserved but unallocated memory is large try setting max_split_size_mb to "
        "avoid fragmentation.",
        seen="lerf#73, AODA#9",
        also={
            "torch 2.1, MGFN#35": "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.70 GiB. GPU "
            "0 has a total capacty of 6.00 GiB of which 0 bytes is free. Of the allocated memory 2.93 GiB is "
            "allocated by PyTorch, and 2.30 GiB is reserved by PyTorch but unallocated.",
        },
    ),
    Signature(
        id="H903",
        title="no GPU memory left for a cuBLAS handle",
        family="out of memory",
        rank=21,
        patterns=(r"\bCUBLAS_STATUS_ALLOC_FAILED\b",),
        restart="remedy",
        changes=_EXPANDABLE,
        means="cuBLAS needs memory of its own outside the allocator of torch, and got none. The GPU is full, often "
        "since another process or rank holds it.",
        fix="Treat it as out of memory: smaller micro-batch, one process per GPU, look at `nvidia-smi`. Leave "
        "head-room with `torch.cuda.set_per_process_memory_fraction(0.95)`.",
        example="RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        seen="Person_reID_baseline#286",
    ),
    Signature(
        id="H904",
        title="cuBLAS could not start: GPU memory is full, or a kernel before it failed",
        family="out of memory",
        rank=25,
        patterns=(r"\bCUBLAS_STATUS_NOT_INITIALIZED\b",),
        restart="stop",
        means="The first matrix product could not create its handle. Either the GPU is full, or an index out of "
        "range in an embedding or a loss spoilt the context just before.",
        fix="Run one batch on the CPU: an index out of range is named there. If it passes, treat it as out of "
        "memory.",
        example="RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        seen="lm-evaluation-harness#1689",
    ),
    Signature(
        id="H905",
        title="cuDNN could not start for want of GPU memory",
        family="out of memory",
        rank=25,
        patterns=(r"\bCUDNN_STATUS_(?:NOT_INITIALIZED|ALLOC_FAILED|INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED)\b",),
        restart="remedy",
        changes=_EXPANDABLE,
        means="cuDNN got no memory for its handle or workspace. In most reports the GPU was simply full; in some the "
        "cuDNN that was found does not fit torch or the driver.",
        fix="Make the batch smaller first. If one image fails too, unset LD_LIBRARY_PATH so that the cuDNN of the "
        "wheel is used, and compare driver and wheel.",
        example="RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
        seen="FilterResponseNormalization#4",
        also={"cuDNN 8": "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED"},
    ),
    Signature(
        id="H906",
        title="host memory is full: torch could not allocate a CPU tensor",
        family="host out of memory",
        rank=20,
        patterns=(
            r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory): you tried to allocate",
            r"\$ Torch: not enough memory: you tried to allocate",
        ),
        restart="remedy",
        changes=_RETURNING,
        means="The system refused memory for a tensor on the CPU. Either the machine, container or limit is full, "
        "or one tensor is absurdly large, which the number of bytes in the message shows.",
        fix="Look at the number of bytes first: a huge one is a wrong shape. Otherwise smaller batch, fewer workers "
        "and prefetched batches, memory-mapped data, no outputs kept over an epoch.",
        example="RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
        "memory: you tried to allocate 120422400000 bytes. Error code 12 (Cannot allocate memory)",
        seen="reproduced on torch 2.13",
        also={
            "Windows": "RuntimeError: [enforce fail at alloc_cpu.cpp:114] data. DefaultCPUAllocator: not enough "
            "memory: you tried to allocate 1073741824 bytes.",
        },
    ),
    Signature(
        id="H907",
        title="host memory is full: Python or numpy could not allocate",
        family="host out of memory",
        rank=22,
        patterns=(r"",),
        exceptions=("MemoryError", "_ArrayMemoryError", "ArrayMemoryError"),
        only_exceptions=True,
        restart="remedy",
        changes=_RETURNING,
        means="The system refused memory to Python or numpy. A whole data set read at once, a list that grows every "
        "step, or a shape by mistake are the usual causes.",
        fix="Read the shape in the message: a huge one is a mistake. Otherwise map the file "
        "(`numpy.load(mmap_mode='r')`), read in parts, keep float32 instead of float64, fewer workers.",
        example="numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7.63 GiB for an array with shape "
        "(1000000, 2048) and data type float32",
        seen="reproduced on torch 2.13 with numpy 2.4",
        also={
            "Python 3.11": "Traceback (most recent call last):\n"
            '  File "train.py", line 7, in <module>\n'
            "    table = [0] * 10**12\n"
            "MemoryError",
        },
    ),
    Signature(
        id="H908",
        title="host memory is full: native code could not allocate",
        family="host out of memory",
        rank=20,
        patterns=(r"\bstd::bad_alloc\b", r"\bstd::bad_array_new_length\b"),
        restart="remedy",
        changes=_RETURNING,
        means="A C++ library (torch, a tokenizer, scipy, a decoder) asked for memory and got none. It tells neither "
        "how much nor where.",
        fix="Watch the resident memory of the process: if it is near the limit, smaller batch, fewer workers, data "
        "in parts. If it is small, one argument is absurdly large: look at the last call of your own code.",
        example="RuntimeError: std::bad_alloc",
        seen="reproduced on torch 2.13",
        also={
            "uncaught in C++": "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  "
            "std::bad_alloc",
        },
    ),
    Signature(
        id="H909",
        title="the kernel killed a process for want of host memory",
        family="host out of memory",
        rank=20,
        patterns=(
            r"\b(?:memory cgroup )?out of memory: Killed process \d+",
            r"\boom-kill:constraint=CONSTRAINT_",
            r"\boom_reaper: reaped process \d+",
            r"\bOOMKilled\b",
        ),
        restart="remedy",
        changes=_RETURNING,
        means="The machine or its container ran out of memory, and the kernel killed the largest process. Every "
        "loader worker counts, with all batches that it has prefetched.",
        fix="Fewer workers and a smaller prefetch_factor; data sets as arrays or memory maps rather than lists of "
        "Python objects, which every worker copies; then a higher limit.",
        false_positives="The kernel log names all processes of the machine: compare the number of the process.",
        example="[12345.678901] Memory cgroup out of memory: Killed process 4711 (python) total-vm:20971520kB, "
        "anon-rss:8388608kB, file-rss:0kB, shmem-rss:0kB, UID:1000 pgtables:16896kB oom_score_adj:0",
        seen="kernel log of a real kill on the machine of the research notes; no log line of torch",
        also={"kubernetes": "    Reason:       OOMKilled"},
    ),
    Signature(
        id="H910",
        title="the scheduler's memory limit killed a process of the job",
        family="host out of memory",
        rank=20,
        patterns=(
            r"Detected \d+ oom[-_ ]kill events? in (?:StepId|step)",
            r"Detected \d+ oom[-_ ]kill event\(s\)",
            r"\bsrun: error: [\w.-]+: tasks? [\d,-]+: Out Of Memory",
            r"\bexceeded (?:job )?memory limit\b",
            r"\bPBS: job killed: (?:p?v|p)?mem \w+ exceeded limit",
            r"\bTERM_MEMLIMIT\b",
        ),
        restart="remedy",
        changes=_RETURNING,
        means="The job used more host memory than it asked the scheduler for; the largest process was killed. "
        "With no `--mem` the site's default applies, which is often a few GiB per core.",
        fix="Ask for more with `--mem` or `--mem-per-cpu`; fewer loader workers; `sacct -j JOB -o MaxRSS` shows "
        "what the job had.",
        example="slurmstepd: error: Detected 1 oom-kill event(s) in StepId=191.batch cgroup. Some of your processes "
        "may have been killed by the cgroup out-of-memory handler.",
        seen="ArjunaUsers#52",
        also={
            "Slurm 22": "slurmstepd: error: Detected 1 oom_kill event in StepId=11300781.0. Some of the step tasks "
            "have been OOM Killed.",
            "srun": "srun: error: Orion-01-01: task 4: Out Of Memory",
        },
    ),
    Signature(
        id="H1101",
        title="the system refused memory for a map, a fork or a subprocess",
        family="host out of memory",
        rank=23,
        patterns=(r"\[Errno 12\] Cannot allocate memory",),
        restart="remedy",
        changes=_RETURNING,
        means="`fork` or `mmap` failed with ENOMEM. A fork of a large process needs as much promised memory again; "
        "a map counts against the limit of address space (`ulimit -v`) even if little of it is read.",
        fix="Start workers before the large data are loaded, or with `forkserver`; fewer workers; raise `ulimit -v`; "
        "look at /proc/sys/vm/overcommit_memory.",
        example="OSError: [Errno 12] Cannot allocate memory",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1102",
        title="no more threads could be started",
        family="host out of memory",
        rank=45,
        patterns=(
            r"^can't start new thread",
            r"\bRuntimeError: can't start new thread",
            r"libgomp: Thread creation failed",
            r"\bOpenBLAS blas_thread_init: pthread_create failed",
        ),
        restart="stop",
        means="A thread needs memory for its stack and a place among the processes of the user (`ulimit -u`, "
        "`pids.max` of the container). One of both is used up, often since every worker starts as many threads as "
        "there are cores.",
        fix="Set OMP_NUM_THREADS=1 for workers; fewer workers; look at `ulimit -u`, `ulimit -v` and `pids.max`.",
        example="RuntimeError: can't start new thread",
        seen="reproduced on torch 2.13",
        also={
            "libgomp": "libgomp: Thread creation failed: Resource temporarily unavailable",
            "OpenBLAS": "OpenBLAS blas_thread_init: pthread_create failed for thread 15 of 16: Resource temporarily "
            "unavailable",
        },
    ),
    Signature(
        id="H1103",
        title="a file of tensors could not be mapped into memory",
        family="host out of memory",
        rank=23,
        patterns=(r"\bunable to mmap \d+ bytes from file <(?!/torch_)",),
        restart="stop",
        means="torch maps checkpoints (`mmap=True`) and shared tensors into memory, and the system refused: a limit "
        "of address space, or too many maps (`vm.max_map_count`).",
        fix="Raise `ulimit -v`; load without `mmap=True` on a machine with room; load and use one shard after "
        "another.",
        example="RuntimeError: unable to mmap 200001499 bytes from file <model.pt>: Cannot allocate memory (12)",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1104",
        title="a tensor or array larger than any memory: a wrong size",
        family="shape or type",
        rank=70,
        patterns=(
            r"Storage size calculation overflowed with sizes=",
            r"\bStride calculation overflowed\b",
            r"\bnumel: integer multiplication overflow\b",
            r"array is too big; `arr\.size \* arr\.dtype\.itemsize`",
            r"Maximum allowed (?:dimension|size) exceeded",
            r"cannot fit 'int' into an index-sized integer",
        ),
        restart="stop",
        means="The number of bytes does not fit into 64 bits. No machine could hold it: two factors of the shape "
        "were multiplied that should not be, or a number of bytes, a hash or an id was taken for a length.",
        fix="Print the sizes just before the line of your code; look for a swapped argument and a length read from "
        "a file.",
        example="RuntimeError: Storage size calculation overflowed with sizes=[17179869184, 17179869184]",
        seen="reproduced on torch 2.13",
        also={
            "numpy": "ValueError: array is too big; `arr.size * arr.dtype.itemsize` is larger than the maximum "
            "possible size.",
            "expanded": "RuntimeError: numel: integer multiplication overflow",
        },
    ),
    Signature(
        id="H1105",
        title="GPU memory is held by somebody else: even the context found no room",
        family="out of memory",
        rank=22,
        patterns=(
            r"\bCuda failure (?:2 )?'out of memory'",
            r"\bCUDA error: out of memory\b",
            r"\bCUDA_ERROR_OUT_OF_MEMORY\b",
            r"Triton Error \[CUDA\]: out of memory",
        ),
        restart="retry",
        means="The driver itself had no memory: for the context, for pinned host memory or for a library. It is not "
        "the allocator of torch that is full; another process holds the GPU, or the default device is the wrong one.",
        fix="Look at `nvidia-smi` for left-over processes of an earlier run and end them. Choose a free GPU with "
        "CUDA_VISIBLE_DEVICES; load checkpoints with map_location='cpu', so that rank n does not also use GPU 0.",
        example="RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at "
        "some other API call, so the stacktrace below might be incorrect.\nFor debugging consider passing "
        "CUDA_LAUNCH_BLOCKING=1.",
        seen="common in issues of many projects; needs a GPU, not reproduced here",
    ),
    Signature(
        id="H1106",
        title="the memory of the Apple GPU is full",
        family="out of memory",
        rank=20,
        patterns=(r"\bMPS backend out of memory\b",),
        restart="stop",
        means="The Metal back-end reached its share of the unified memory, which all programs of the machine use "
        "too.",
        fix="Make the batch smaller and close other programs. PYTORCH_MPS_HIGH_WATERMARK_RATIO raises the share, at "
        "the risk of swapping.",
        example="RuntimeError: MPS backend out of memory (MPS allocated: 17.81 GB, other allocations: 346.21 MB, "
        "max allowed: 18.13 GB). Tried to allocate 256.00 MB on private pool. Use "
        "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory allocations (may cause system "
        "failure).",
        seen="common in issues of many projects; needs a Mac, not reproduced here",
    ),
    Signature(
        id="H1107",
        title="a Triton kernel needs more shared memory than the GPU has",
        family="device",
        rank=31,
        patterns=(r"\bout of resources?: shared memory, Required: \d+, Hardware limit: \d+",),
        restart="stop",
        means="The block sizes of a Triton kernel were chosen for a larger GPU. It is no want of GPU memory.",
        fix="Make block sizes or `num_stages` of the kernel smaller, or update the library that brings it.",
        example="triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 147456, Hardware "
        "limit: 101376. Reducing block sizes or `num_stages` may help.",
        seen="common in issues of Triton kernels; needs a GPU, not reproduced here",
    ),
)
