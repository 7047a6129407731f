"""Signatures of loading in processes: workers that die, hang, or cannot be sent their data.

Wrong options of loaders, and what samples are made of, lie in ``loaders`` and ``samples``. Does not match anything.
"""

from __future__ import annotations

from holdfast.explain.signature import Signature
from holdfast.explain.signatures.loaders import SIGNATURES as _LOADERS
from holdfast.explain.signatures.samples import SIGNATURES as _SAMPLES

_SIGNAL = r"DataLoader worker \(pid\(?s?\)? [\d, ]+\) is killed by signal: "

_DEATHS: tuple[Signature, ...] = (
    Signature(
        id="H929",
        title="a loader worker died, and nothing says how",
        family="loader",
        rank=90,
        restart="retry",
        patterns=(
            r"DataLoader worker \(pid\(s\) [\d, ]+\) exited unexpectedly",
            r"\bbackground workers are no longer alive\b",  # batchgenerators
        ),
        means="A worker process of the DataLoader is gone. The exception that this one was raised from names the "
        "signal or exit code; here it was not printed.",
        fix="Print the whole traceback with its cause instead of the message alone. Then run once with "
        "num_workers=0, and look at the memory of the machine at that time.",
        false_positives="Another signature of the loader explains it when the cause was printed too.",
        example="loading failed: DataLoader worker (pid(s) 6142) exited unexpectedly",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H930",
        title="a loader worker was killed (SIGKILL), mostly by the kernel for want of memory",
        family="host out of memory",
        rank=50,
        restart="retry",
        patterns=(_SIGNAL + r"Killed",),
        means="Somebody sent SIGKILL to a worker. Mostly it is the kernel's out-of-memory killer: each worker holds "
        "its prefetched batches, and a copy of every Python object of the dataset that it touches. Only the "
        "oom_kill counter or the kernel log can tell that from an administrator.",
        fix="Use fewer workers and a smaller prefetch_factor. Keep the index of the dataset in arrays or tensors, "
        "not in lists of objects. Raise the memory limit of the job.",
        false_positives="Somebody killed the worker by hand; then the oom_kill counter did not rise.",
        example="RuntimeError: DataLoader worker (pid 6174) is killed by signal: Killed.",
        seen="reproduced on torch 2.13; pytorch#13246",
        also={
            "torch 1.x, without plural": "RuntimeError: DataLoader worker (pid 4097) is killed by signal: Killed. "
        },
    ),
    Signature(
        id="H931",
        title="a loader worker met a bus error: shared memory is full, or a mapped file shrank",
        family="loader",
        rank=50,
        restart="retry",
        patterns=(
            _SIGNAL + r"Bus error",
            r"Unexpected bus error encountered in worker",
        ),
        means="The worker touched a page that has no memory or no file behind it. Batches travel through /dev/shm, "
        "64 MB in a container by default; a memory-mapped data file that was truncated gives the same signal.",
        fix="Give the container more shared memory (--shm-size=8g or --ipc=host), or use fewer workers. If the "
        "dataset maps files, check that none was overwritten or cut short meanwhile.",
        example="RuntimeError: DataLoader worker (pid 6550) is killed by signal: Bus error. It is possible that "
        "dataloader's workers are out of shared memory. Please try to raise your shared memory limit.",
        seen="reproduced on torch 2.13; pytorch#5040",
        also={
            "torch 1.x": "RuntimeError: DataLoader worker (pid 13881) is killed by signal: Bus error. It is possible "
            "that dataloader's workers are out of shared memory. Please try to raise your shared memory limit.",
        },
    ),
    Signature(
        id="H932",
        title="no room in shared memory for a tensor",
        family="loader",
        rank=45,
        restart="retry",
        patterns=(
            r"unable to allocate shared memory\s?\(shm\)",
            r"unable to write to file </torch_\d+[^>]*>",
            r"unable to resize file </torch_\d+[^>]*>",
        ),
        means="A tensor that goes to another process needs a file in /dev/shm, and that is full or limited.",
        fix="Enlarge /dev/shm (--shm-size=8g or --ipc=host for containers), or use fewer workers, smaller batches "
        "and a smaller prefetch_factor. Look for stale /dev/shm/torch_* files of dead jobs.",
        example="RuntimeError: unable to allocate shared memory(shm) for file </torch_31734_3057940268_0>: No "
        "space left on device (28)",
        seen="reproduced on torch 2.13; pytorch#5040",
        also={
            "torch 1.0": "RuntimeError: unable to write to file </torch_18692_1954506624>",
            "torch 1.12": "RuntimeError: unable to write to file </torch_18692_1954506624_0>: No space left on "
            "device (28)",
        },
    ),
    Signature(
        id="H933",
        title="a loader worker crashed with a segmentation fault",
        family="crash",
        rank=50,
        patterns=(_SIGNAL + r"Segmentation fault",),
        means="Native code that runs in the worker read memory that is not its own: an image or audio decoder on a "
        "broken file, OpenCV or HDF5 used after a fork, or an extension built for another version.",
        fix="Find the sample: run with num_workers=0 under `python -X faulthandler`, which prints the stack. Then "
        "leave that file out or upgrade the library. For OpenCV, cv2.setNumThreads(0) in the worker helps.",
        example="RuntimeError: DataLoader worker (pid 6612) is killed by signal: Segmentation fault.",
        seen="reproduced on torch 2.13",
        also={
            "torch 1.x": "RuntimeError: DataLoader worker (pid 3101) is killed by signal: Segmentation fault. ",
        },
    ),
    Signature(
        id="H1201",
        title="a loader worker crashed in native code (abort, illegal instruction or division)",
        family="crash",
        rank=50,
        patterns=(_SIGNAL + r"(?:Aborted|Floating point exception|Illegal instruction|Trace/breakpoint trap)",),
        means="A library that the dataset uses ended the worker: a failed C++ assertion, a corrupted heap, or an "
        "instruction that this processor does not have.",
        fix="Read what the library printed above; run with num_workers=0 under `python -X faulthandler` for the "
        "stack. For an illegal instruction install a build for this processor.",
        example="RuntimeError: DataLoader worker (pid 6657) is killed by signal: Aborted.",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1202",
        title="a loader worker was terminated from outside (SIGTERM or a like signal)",
        family="loader",
        rank=50,
        restart="retry",
        patterns=(_SIGNAL + r"(?!Killed|Bus error|Segmentation|Aborted|Floating|Illegal|Trace/)[A-Z]",),
        means="A signal meant to end processes reached a worker: a scheduler that stops the job, a clean-up script, "
        "or the program's own code.",
        fix="If the job was stopped at the same moment, nothing is wrong with the loader. Otherwise look for who "
        "sends signals to processes called python or pt_data_worker.",
        example="RuntimeError: DataLoader worker (pid 7748) is killed by signal: Terminated.",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H934",
        title="a loader worker did not deliver in time",
        family="hang",
        rank=52,
        restart="retry",
        patterns=(r"DataLoader timed out after [\d.]+ seconds",),
        means="No batch came within the `timeout` of the DataLoader. A worker waits for a lock that was held at the "
        "fork, for a file system or socket, or one sample takes very long; or a result could not be pickled.",
        fix="Take the stack of the worker (py-spy dump --pid), which names the line. Set one thread in libraries "
        "that have their own (OpenMP, OpenCV), make connections in worker_init_fn, or use "
        "multiprocessing_context='forkserver'.",
        example="RuntimeError: DataLoader timed out after 1 seconds",
        seen="reproduced on torch 2.13; pytorch#1355",
    ),
    Signature(
        id="H935",
        title="a loader worker ended itself with an exit code",
        family="loader",
        rank=55,
        patterns=(r"DataLoader worker \(pid\(?s?\)? [\d, ]+\) exited unexpectedly with exit code \d+",),
        means="Code in the worker called sys.exit or os._exit, or the worker failed while it started, such as when "
        "a spawned worker cannot import the main module. The worker's own words stand above, if it left any.",
        fix="Run with num_workers=0: then the exit is seen where it happens. Replace exit calls in datasets, "
        "collate functions and worker_init_fn by exceptions.",
        example="RuntimeError: DataLoader worker (pid 6813) exited unexpectedly with exit code 3. Details are "
        "lost due to multiprocessing. Rerunning with num_workers=0 may give better error trace.",
        seen="reproduced on torch 2.13",
    ),
)

_HANDOVER: tuple[Signature, ...] = (
    Signature(
        id="H936",
        title="file descriptors ran out between loader workers and the trainer",
        family="loader",
        rank=46,
        restart="retry",
        patterns=(
            r"Too many open files\. Communication with the workers is no longer possible",
            r"unable to open shared memory object </torch_[^>]*>[^\n]{0,80}Too many open files",
        ),
        means="Each tensor that comes from a worker holds one descriptor for as long as it lives. Batches that are "
        "kept, or samples of many tensors, reach the limit of the process.",
        fix="Call torch.multiprocessing.set_sharing_strategy('file_system') first of all, or raise `ulimit -n`. Do "
        "not keep batches: copy what you keep with .clone(). Let a sample be few large tensors.",
        example="RuntimeError: Too many open files. Communication with the workers is no longer possible. Please "
        "increase the limit using `ulimit -n` in the shell or change the sharing strategy by calling "
        "`torch.multiprocessing.set_sharing_strategy('file_system')` at the beginning of your code",
        seen="reproduced on torch 2.13; pytorch#11201",
        also={
            "torch 1.x": "RuntimeError: unable to open shared memory object </torch_29919_1396182366> in read-write "
            "mode: Too many open files (24)",
        },
    ),
    Signature(
        id="H937",
        title="file descriptors of shared tensors did not arrive: the limit is reached",
        family="loader",
        rank=46,
        restart="retry",
        patterns=(r"received \d+ items of ancdata",),
        means="A tensor was sent to this process by its file descriptor, and the process may not open any more.",
        fix="As for H936: set_sharing_strategy('file_system'), a higher `ulimit -n`, and no kept batches.",
        example="RuntimeError: received 0 items of ancdata",
        seen="reproduced on torch 2.13; pytorch#973",
    ),
    Signature(
        id="H938",
        title="the thread that pins memory died",
        family="loader",
        rank=56,
        restart="retry",
        patterns=(r"Pin memory thread exited unexpectedly",),
        means="With pin_memory=True a thread copies batches into pinned memory. It ended by an error of its own: the "
        "queue of a dead worker, no pinned memory left, or a CUDA error.",
        fix="Read the first traceback above, which is the thread's own. If there is none, try pin_memory=False and "
        "fewer workers.",
        example="RuntimeError: Pin memory thread exited unexpectedly",
        seen="pytorch#47445; needs a GPU, not reproduced here",
    ),
    Signature(
        id="H939",
        title="a shared tensor is gone with the process that made it",
        family="loader",
        rank=68,
        role="cascade",
        restart="retry",
        only_exceptions=True,
        exceptions=("ConnectionResetError", "ConnectionRefusedError", "FileNotFoundError", "BrokenPipeError"),
        frames=(r"reductions\.py:rebuild_storage_fd",),
        patterns=(r"Connection reset by peer", r"Connection refused", r"No such file or directory", r"Broken pipe"),
        means="A tensor in a queue is only a ticket for its memory. The process that put it there ended before the "
        "tensor was fetched: a dead worker, or a trainer that left its loader early.",
        fix="Look for the end of the other process; it comes first. In own code keep the producer alive until all "
        "was fetched, or send NumPy arrays.",
        example="Traceback (most recent call last):\n  File "
        '"/venv/lib/python3.11/site-packages/torch/multiprocessing/reductions.py", line 538, in '
        "rebuild_storage_fd\n"
        "ConnectionRefusedError: [Errno 111] Connection refused",
        seen="reproduced on torch 2.13; pytorch#28950",
    ),
    Signature(
        id="H1210",
        title="shared memory cannot be mapped: too many mappings or no address space",
        family="loader",
        rank=46,
        restart="retry",
        patterns=(r"unable to mmap \d+ bytes from file </torch_[^>]*>",),
        means="Each shared tensor is one mapping of the process. The number of mappings (vm.max_map_count, 65530 by "
        "default), the address space, or the memory is used up.",
        fix="Do not keep batches or many small shared tensors; pack them into few. Else raise vm.max_map_count, or "
        "the limit of the address space (`ulimit -v`).",
        example="RuntimeError: unable to mmap 8388608 bytes from file </torch_4368_428310534_8>: Cannot allocate "
        "memory (12)",
        seen="reproduced on torch 2.13",
        also={
            "torch 1.x": "RuntimeError: unable to mmap 1024 bytes from file </torch_40419_2696082440_7>: Cannot "
            "allocate memory (12)",
        },
    ),
    Signature(
        id="H1222",
        title="the process has too many files open",
        family="loader",
        rank=48,
        restart="retry",
        patterns=(r"\[Errno 24\] Too many open files",),
        means="The limit of open files is reached: files or connections that are opened for each sample and never "
        "closed, shared tensors that are kept, or a limit far too low for the number of workers.",
        fix="Open files in a `with` block, keep few handles for each worker, and raise `ulimit -n`. For shared "
        "tensors see H936.",
        example="OSError: [Errno 24] Too many open files: '74.txt'",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1211",
        title="the manager of shared memory cannot start",
        family="environment",
        rank=46,
        patterns=(r"\btorch_shm_manager\b[^\n]{0,300}(?:error|could not|failed|no response|Permission denied)",),
        means="The strategy 'file_system' starts a helper process that needs a writable temporary directory for its "
        "socket. There is none, or the helper may not be executed.",
        fix="Let TMPDIR point to an existing, writable, local directory with a short path. Or go back to "
        "set_sharing_strategy('file_descriptor') with a higher `ulimit -n`.",
        example="RuntimeError: torch_shm_manager at "
        '"/venv/lib/python3.11/site-packages/torch/bin/torch_shm_manager": could not generate a random '
        "directory for manager socket",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1218",
        title="the collate function returned what cannot be pinned",
        family="loader",
        rank=60,
        patterns=(r"cannot pin '[\w.]+' only dense CPU tensors can be pinned",),
        means="pin_memory=True copies each batch into pinned host memory. A tensor of the batch lies on the GPU "
        "already, or is sparse.",
        fix="Leave moving to the GPU to the training loop, after the loader; or set pin_memory=False.",
        example="RuntimeError: cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned",
        seen="needs a GPU, not reproduced here",
    ),
    Signature(
        id="H1219",
        title="the loader shuffles with a generator of another device",
        family="device",
        rank=60,
        patterns=(r"Expected a '\w+' device type for generator but found '\w+'",),
        means="A random operation got a generator of another device. With torch.set_default_device('cuda') the "
        "sampler of a DataLoader draws on the GPU, while its generator is on the CPU.",
        fix="Give the DataLoader generator=torch.Generator(device='cuda'), or do not set the default device and move "
        "model and batches instead.",
        example="RuntimeError: Expected a 'cuda' device type for generator but found 'cpu'",
        seen="needs a GPU, not reproduced here",
    ),
)

SIGNATURES: tuple[Signature, ...] = (*_DEATHS, *_HANDOVER, *_LOADERS, *_SAMPLES)
"""Every signature of loading."""
