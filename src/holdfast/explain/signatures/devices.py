"""Signatures of GPUs, drivers and kernels that fail: hardware faults, dead contexts, builds that do not fit.

Devices that the program chose wrongly or mixed lie in ``device_choice``, memory that ran out in ``memory``.
"""

from __future__ import annotations

from holdfast.explain.signature import Signature
from holdfast.explain.signatures.device_choice import SIGNATURES as _CHOICE

_LATER = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable "
    "device-side assertions."
)

_FAULTS: tuple[Signature, ...] = (
    Signature(
        id="H911",
        title="an assertion in a GPU kernel failed, mostly an index out of range",
        family="device",
        rank=30,
        patterns=(r"\bdevice-side assert(?:ion)?s? (?:was |were )?triggered", r"\bcudaErrorAssert\b"),
        restart="stop",
        means="A kernel met an index or label outside its range. The error is reported later than it happened, so "
        "the line in the traceback is often innocent, and the CUDA context of the process is dead.",
        fix="Run the same batch on the CPU: the text there names the index. Otherwise run once with "
        "CUDA_LAUNCH_BLOCKING=1. Check labels, vocabulary size and positions longer than the table.",
        example="torch.AcceleratorError: CUDA error: device-side assert triggered" + _LATER,
        seen="Pytorch-UNet#375",
        also={
            "torch 1.0, DCL#5": "RuntimeError: cuda runtime error (59) : device-side assert triggered at "
            "/opt/conda/conda-bld/pytorch_1556653215914/work/aten/src/THCUNN/generic/ClassNLLCriterion.cu:110"
        },
    ),
    Signature(
        id="H912",
        title="a label lies outside the classes, or an index outside its table, said by a GPU kernel",
        family="shape or type",
        rank=29,
        explains=("H911",),
        patterns=(
            r"Assertion `t >= 0 && t < n_classes` failed",
            r"Assertion `cur_target >= 0 && cur_target < n_classes` failed",
            r"Assertion `srcIndex < srcSelectDimSize` failed",
            r"\.cu:\d+:[^\n]{0,200} Assertion `[^`\n]{0,80}\bindex out of bounds\"?`? failed",
        ),
        restart="stop",
        means="The kernel of a loss or an embedding printed which assertion failed: the label or index is negative "
        "or too large. It is the cause of the 'device-side assert' that follows.",
        fix="Compare the smallest and largest label with the number of classes, and the largest token with the size "
        "of the embedding. Map the labels to 0 ... n-1, and give the value for 'no label' as `ignore_index`.",
        example="../aten/src/ATen/native/cuda/NLLLoss2d.cu:103: nll_loss2d_forward_kernel: block: [5,0,0], thread: "
        "[996,0,0] Assertion `t >= 0 && t < n_classes` failed.",
        seen="Pytorch-UNet#375, ms-swift#3267",
        also={
            "embedding, qlora-chinese-LLM#3": "../aten/src/ATen/native/cuda/Indexing.cu:1146: indexSelectLargeIndex: "
            "block: [336,0,0], thread: [0,0,0] Assertion `srcIndex < srcSelectDimSize` failed.",
        },
    ),
    Signature(
        id="H913",
        title="a GPU kernel read or wrote where it must not",
        family="device",
        rank=30,
        patterns=(
            r"\ban illegal memory access was encountered",
            r"\bCUDA error: (?:misaligned address|unspecified launch failure|an illegal instruction was encountered)",
            r"\bCUDA_ERROR_ILLEGAL_ADDRESS\b",
        ),
        restart="retry",
        means="A kernel used an address outside its tensors: a custom or compiled kernel with a fault, an index "
        "beyond 2^31, or memory freed too early on another stream. Seldom it is the hardware. The traceback may "
        "point elsewhere.",
        fix="Run once with CUDA_LAUNCH_BLOCKING=1 to see the kernel, and with compute-sanitizer if it is your own. "
        "Try without custom kernels and without `torch.compile`, then another version of torch. On one node only: "
        "check it.",
        example="RuntimeError: CUDA error: an illegal memory access was encountered" + _LATER,
        seen="Open-Sora#694, pytorch#34220",
        also={"another kernel fault": "RuntimeError: CUDA error: misaligned address"},
    ),
    Signature(
        id="H914",
        title="the memory of the GPU is faulty (uncorrectable ECC error)",
        family="hardware",
        rank=10,
        patterns=(r"\buncorrectable ECC error (?:encountered|was)", r"\bCUDA_ERROR_ECC_UNCORRECTABLE\b"),
        restart="stop",
        means="The GPU found a memory error that it could not correct, and stopped the context. The same GPU is "
        "likely to fail again until it was reset or replaced.",
        fix="Leave this node, and go on from the last checkpoint on another. Report the GPU; `nvidia-smi -q -d ECC` "
        "shows the counters and pages to be retired.",
        example="RuntimeError: CUDA error: uncorrectable ECC error encountered",
        seen="vllm#5222, accelerate#1192",
        also={
            "driver": "failed call to cuDevicePrimaryCtxRetain: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC "
            "error encountered",
        },
    ),
    Signature(
        id="H915",
        title="a link between GPUs is faulty (uncorrectable NVLink error)",
        family="hardware",
        rank=10,
        patterns=(r"\buncorrectable NVLink error\b", r"\bCUDA_ERROR_NVLINK_UNCORRECTABLE\b"),
        restart="stop",
        means="A transfer over NVLink broke and could not be repeated. The context is dead; the traceback points at "
        "whatever call came next.",
        fix="Leave this node. `nvidia-smi nvlink -e` shows which link counts errors; report it.",
        example="RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution",
        seen="nnUNet#1519",
    ),
    Signature(
        id="H916",
        title="the driver lost the GPU or reported a fault of it (Xid)",
        family="hardware",
        rank=11,
        patterns=(
            r"\bNVRM: Xid \(PCI:[0-9a-f:.]+\): (?:48|61|62|63|64|74|79|92|94|95|110|119|120|140)\b",
            r"\bfallen off the bus\b",
            r"\bGPU is lost\b",
            r"\bUnable to determine the device handle for GPU\b",
            r"\bCUDA error: (?:the device|GPU) is lost",
        ),
        restart="stop",
        means="The kernel driver wrote down a fault of the GPU: it does not answer on the bus, or its memory, link "
        "or firmware failed. Heat, power and a loose card are the usual reasons.",
        fix="Leave this node and reset the GPU or reboot. Report the Xid number: the driver's manual says what each "
        "means.",
        false_positives="Xid 13, 31 and 43 come from faulty kernels of a program, not from hardware, and do not "
        "count here.",
        example="NVRM: Xid (PCI:0000:44:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        seen="NVSentinel#155",
        also={
            "newer driver, NVSentinel#155": "               NVRM: fallen off the bus and is not responding to "
            "commands.",
            "nvidia-smi": "Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost.  Reboot the "
            "system to recover this GPU",
        },
    ),
    Signature(
        id="H1151",
        title="this torch has no kernels for this GPU",
        family="environment",
        rank=35,
        patterns=(
            r"\bno kernel image is available for execution on the device",
            r"with CUDA capability sm_\d+ is not compatible with the current PyTorch installation",
            r"\bdevice kernel image is invalid\b",
        ),
        restart="stop",
        means="The wheel, or an extension that was compiled, holds code for other generations of GPUs: this one is "
        "too new or too old.",
        fix="`torch.cuda.get_arch_list()` shows what the wheel has. Install a build for a newer CUDA (new GPU) or "
        "an older torch (old GPU); compile extensions again with TORCH_CUDA_ARCH_LIST set.",
        example="RuntimeError: CUDA error: no kernel image is available for execution on the device" + _LATER,
        seen="pytorch#31285",
        also={
            "the warning before": "NVIDIA RTX A6000 with CUDA capability sm_86 is not compatible with the current "
            "PyTorch installation.",
        },
    ),
    Signature(
        id="H1152",
        title="a GPU number that does not exist",
        family="device",
        rank=35,
        patterns=(r"\binvalid device ordinal\b", r"\bInvalid device id\b", r"\bInvalid device index\b"),
        restart="stop",
        means="The program asks for a GPU with a higher number than there are. CUDA_VISIBLE_DEVICES renumbers from "
        "0, and more processes than GPUs were started.",
        fix="Use LOCAL_RANK, not RANK, as number of the GPU. Start as many processes per node as "
        "`torch.cuda.device_count()` says; remove fixed `cuda:1`.",
        example="RuntimeError: CUDA error: invalid device ordinal" + _LATER,
        seen="PyDeepFakeDet#1",
        also={"DataParallel": "AssertionError: Invalid device id"},
    ),
    Signature(
        id="H1153",
        title="no GPU is visible, or no driver is there",
        family="environment",
        rank=35,
        patterns=(
            r"\bNo CUDA GPUs are available\b",
            r"\bFound no NVIDIA driver on your system\b",
            r"\bno CUDA-capable device is detected\b",
            r"\bNVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver\b",
        ),
        restart="stop",
        means="torch is built for CUDA, but the process sees no GPU: the container was started without GPUs, the "
        "job asked for none, CUDA_VISIBLE_DEVICES is empty or wrong, or the driver is not loaded.",
        fix="Run `nvidia-smi` in the same shell. Then ask for the GPU (`--gpus all`, `--gres=gpu:1`), and look at "
        "CUDA_VISIBLE_DEVICES.",
        example="RuntimeError: No CUDA GPUs are available",
        seen="common in issues of many projects; needs a CUDA build, not reproduced here",
        also={
            "no driver": "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA "
            "GPU and installed a driver from http://www.nvidia.com/Download/index.aspx",
        },
    ),
    Signature(
        id="H1154",
        title="the NVIDIA driver is too old for this torch",
        family="environment",
        rank=35,
        patterns=(
            r"\bThe NVIDIA driver on your system is too old\b",
            r"\bCUDA driver version is insufficient for CUDA runtime version\b",
            r"\bthe provided PTX was compiled with an unsupported toolchain\b",
        ),
        restart="stop",
        means="The wheel of torch was built for a newer CUDA than the driver of the machine knows.",
        fix="Install the wheel for the CUDA version that `nvidia-smi` shows in its first line, or update the driver.",
        example="RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please update "
        "your GPU driver by downloading and installing a new version from the URL: "
        "http://www.nvidia.com/Download/index.aspx",
        seen="common in issues of many projects; needs a CUDA build, not reproduced here",
        also={"runtime": "RuntimeError: CUDA error: CUDA driver version is insufficient for CUDA runtime version"},
    ),
    Signature(
        id="H1155",
        title="the driver is in a state in which CUDA cannot start",
        family="environment",
        rank=36,
        patterns=(
            r"\bUnexpected error from cudaGetDeviceCount\(\)",
            r"\bforward compatibility was attempted on non supported HW",
            r"\bCUDA unknown error - this may be due to an incorrectly set up environment",
            r"\bDriver/library version mismatch\b",
        ),
        restart="stop",
        means="The kernel module and the user libraries of the driver differ (after an update without a reboot, or "
        "in a container with libraries of its own), or the fabric manager of an NVSwitch machine does not run.",
        fix="Reboot, or load the module again. Error 804: remove `cuda-compat` from the container or update the "
        "driver. Error 802: start nvidia-fabricmanager. After suspend: reload nvidia_uvm.",
        example="RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before "
        "calling NumCudaDevices() that might have already set an error? Error 804: forward compatibility was "
        "attempted on non supported HW",
        seen="Video-LLaVA#22",
        also={"nvidia-smi": "Failed to initialize NVML: Driver/library version mismatch"},
    ),
    Signature(
        id="H1156",
        title="the GPU is taken: exclusive mode, or another process",
        family="device",
        rank=35,
        patterns=(
            r"\bCUDA-capable device\(s\) is/are busy or unavailable",
            r"all CUDA-capable devices are busy or unavailable",
        ),
        restart="retry",
        means="The GPU allows one process only (exclusive mode) and has one, or it hangs after a fault.",
        fix="Look at `nvidia-smi` for the process and for 'E. Process' as compute mode. End what is left over; "
        "`nvidia-smi -c 0` allows several.",
        example="RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable" + _LATER,
        seen="common in issues of many projects; needs a GPU, not reproduced here",
        also={"older": "RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable"},
    ),
    Signature(
        id="H1157",
        title="the system stopped a GPU kernel that took too long",
        family="device",
        rank=35,
        patterns=(r"\bthe launch timed out and was terminated\b", r"\bCUDA_ERROR_LAUNCH_TIMEOUT\b"),
        restart="stop",
        means="A GPU that also drives a display stops kernels after some seconds.",
        fix="Use a GPU without display, or make the work of one kernel smaller (a smaller batch).",
        example="RuntimeError: CUDA error: the launch timed out and was terminated" + _LATER,
        seen="common in issues of many projects; needs a GPU, not reproduced here",
    ),
    Signature(
        id="H1158",
        title="a cuDNN kernel failed",
        family="device",
        rank=40,
        patterns=(r"\bCUDNN_STATUS_(?:EXECUTION_FAILED|MAPPING_ERROR|INTERNAL_ERROR|BAD_PARAM|NOT_SUPPORTED)\w*",),
        restart="retry",
        means="A convolution or recurrent layer failed inside cuDNN: the GPU is nearly full, the cuDNN found does "
        "not fit, an input is not contiguous or empty, or an earlier kernel spoilt the context.",
        fix="Try a smaller batch; then `torch.backends.cudnn.enabled = False` for one run: another error may name "
        "the cause. Unset LD_LIBRARY_PATH, so that the cuDNN of the wheel is used.",
        example="RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        seen="sdnext#1574",
    ),
    Signature(
        id="H1159",
        title="cuDNN found no algorithm for a convolution",
        family="device",
        rank=40,
        patterns=(
            r"\bUnable to find a valid cuDNN algorithm to run convolution",
            r"\b(?:FIND|GET) was unable to find an engine to execute this computation",
        ),
        restart="retry",
        means="No algorithm fitted into the memory that is left, or none supports this layout, type or GPU.",
        fix="Make the batch smaller first: mostly it is out of memory in other words. Then try float32, and a wheel "
        "that fits the GPU.",
        example="RuntimeError: Unable to find a valid cuDNN algorithm to run convolution",
        seen="common in issues of many projects; needs a GPU, not reproduced here",
        also={"torch 2.0": "RuntimeError: GET was unable to find an engine to execute this computation"},
    ),
    Signature(
        id="H1160",
        title="a matrix product failed inside cuBLAS",
        family="device",
        rank=40,
        patterns=(
            r"\bCUBLAS_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|INVALID_VALUE|NOT_SUPPORTED|ARCH_MISMATCH)\b",
        ),
        restart="retry",
        means="cuBLAS refused or broke off: an earlier kernel spoilt the context (an index out of range), two cuBLAS "
        "libraries are mixed, or the type is not supported on this GPU.",
        fix="Run one batch on the CPU to exclude a wrong index. Uninstall a second cuBLAS (`pip list | grep cublas`, "
        "LD_LIBRARY_PATH). Try float32.",
        example="RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, "
        "opb, m, n, k, &alpha, a, lda, b, ldb, &beta, c, ldc)`",
        seen="common in issues of many projects; needs a GPU, not reproduced here",
    ),
    Signature(
        id="H1170",
        title="no attention or compiled kernel for this device and these inputs",
        family="device",
        rank=40,
        patterns=(
            r"\bNo available kernel\.\s+Aborting execution",
            r"\bNo viable backend for scaled_dot_product_attention",
            r"\bFlashAttention only supports \w+ GPUs or newer",
            r"\bis too old to be supported by the triton GPU compiler",
            r"\bYour setup doesn't support bf16/gpu",
        ),
        restart="stop",
        means="A fused kernel was forced (`sdpa_kernel`, flash-attn, Triton, bf16) that does not support the "
        "generation of the GPU, the type, the head size, a mask or dropout.",
        fix="Allow the other backends of `sdpa_kernel` or use `attn_implementation='sdpa'` instead of flash "
        "attention; the warnings just before name what did not fit. On GPUs before Ampere train in fp16 with a "
        "scaler.",
        example="RuntimeError: No available kernel.  Aborting execution.",
        seen="reproduced on torch 2.13",
        also={
            "flash-attn": "RuntimeError: FlashAttention only supports Ampere GPUs or newer.",
        },
    ),
    Signature(
        id="H1171",
        title="a CUDA graph met an operation that cannot be captured",
        family="device",
        rank=31,
        patterns=(
            r"\boperation not permitted when stream is capturing",
            r"\boperation failed due to a previous error during capture",
        ),
        restart="stop",
        means="While a CUDA graph is recorded, nothing may wait for the GPU or allocate outside its pool: "
        "`.item()`, printing a tensor, a copy from pageable memory, the first call of a library.",
        fix="Warm up on a side stream first, take `.item()`, checks and logging out of the captured part, and keep "
        "shapes fixed. With `torch.compile(mode='reduce-overhead')` try the default mode.",
        example="RuntimeError: CUDA error: operation not permitted when stream is capturing" + _LATER,
        seen="common in issues of many projects; needs a GPU, not reproduced here",
    ),
)

SIGNATURES: tuple[Signature, ...] = (*_FAULTS, *_CHOICE)
