"""Signatures of devices that the program chose wrongly, mixed, or that this build of torch does not have.

Part of ``devices``, whose tuple holds them too.
"""

from __future__ import annotations

from holdfast.explain.signature import Signature

SIGNATURES: tuple[Signature, ...] = (
    Signature(
        id="H917",
        title="this torch is built without CUDA, and the program asks for it",
        family="environment",
        rank=60,
        patterns=(
            r"\bTorch not compiled with CUDA enabled",
            r"\bCannot get CUDA generator without ATen_cuda library",
            r"\bTried to instantiate dummy base class \w*(?:Stream|Event|CUDA|Cuda)\w*",
            r"\bPyTorch (?:not|was) compiled with(?:out)? CUDA support",
            r"\btorch\.cuda\.\w+ requires CUDA support",
            r"module 'torch\._C' has no attribute '_(?:cuda|nccl|cudart|cudnn)\w*'",
        ),
        restart="stop",
        means="The installed wheel is the one for CPUs (its version ends in `+cpu`), or the wheel for this system "
        "has no CUDA at all.",
        fix="Install the CUDA wheel with the command from pytorch.org. If the CPU is meant: choose the device by "
        "`torch.accelerator` or `torch.cuda.is_available()` rather than by `.cuda()`.",
        example="AssertionError: Torch not compiled with CUDA enabled",
        seen="reproduced on torch 2.13",
        also={
            "set_device": "AttributeError: module 'torch._C' has no attribute '_cuda_setDevice'",
            "Event": "RuntimeError: Tried to instantiate dummy base class Event",
            "Stream": "RuntimeError: torch.cuda.Stream requires CUDA support",
        },
    ),
    Signature(
        id="H918",
        title="CUDA used in a forked process",
        family="loader",
        rank=50,
        patterns=(
            r"\bCannot re-initialize CUDA in forked subprocess",
            r"\bCUDA error: initialization error",
        ),
        restart="stop",
        means="A process that was forked after CUDA had started touches the GPU: mostly a loader worker whose "
        "dataset or collate function makes CUDA tensors.",
        fix="Keep the dataset on the CPU and move the batch in the training loop. If it cannot be: "
        "`multiprocessing_context='spawn'`.",
        example="RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, "
        "you must use the 'spawn' start method",
        seen="pycls#183; torch/cuda/__init__.py of torch 2.13",
    ),
    Signature(
        id="H919",
        title="tensors of one operation lie on different devices",
        family="device",
        rank=60,
        patterns=(
            r"\bExpected all tensors to be on the same device",
            r"\bis not on the expected device\b",
            r"\bInput and (?:parameter|hidden) tensors are not at the same device",
            r"\bInput type \(torch\.(?:cuda|xpu|mps)\.\w+\) and weight type \(torch\.(?!cuda|xpu|mps)\w+\)",
            r"\bInput type \(torch\.(?!cuda|xpu|mps)\w+\) and weight type \(torch\.(?:cuda|xpu|mps)\.\w+\)",
            r"\bindices should be either on \w+ or on the same device as the indexed tensor",
            r"\bExpected object of (?:device type|backend) \w+ but got (?:device type|backend) \w+ for argument",
            r"\bmodule must have its parameters and buffers on device \S+ \(device_ids\[0\]\)",
            r"\bexpected self and mask to be on the same device\b",
        ),
        restart="stop",
        means="Model and input, or two inputs, are on different devices: something was not moved, or a tensor is "
        "made inside `forward` on the default device.",
        fix="Move the whole batch to the device of the model. In `forward` make tensors with `device=x.device`; "
        "register constants as buffers, and keep modules in ModuleList rather than in a list.",
        example="RuntimeError: Tensor on device cpu is not on the expected device meta!",
        seen="reproduced on torch 2.13 with the devices meta and cpu",
        also={
            "cuda and cpu, torch 1.10 and later": "RuntimeError: Expected all tensors to be on the same device, but "
            "found at least two devices, cuda:0 and cpu!",
            "torch 1.8, conv": "RuntimeError: Input type (torch.cuda.FloatTensor) and weight type "
            "(torch.FloatTensor) should be the same",
            "RNN": "RuntimeError: Input and parameter tensors are not at the same device, found input tensor at cpu "
            "and parameter tensor at cuda:0",
            "torch 1.4": "RuntimeError: Expected object of device type cuda but got device type cpu for argument #1 "
            "'self' in call to _th_index_select",
        },
    ),
    Signature(
        id="H920",
        title="a checkpoint from a device that is not here",
        family="checkpoint",
        rank=60,
        patterns=(
            r"\bAttempting to deserialize object on (?:a )?\w+ device\b",
            r"\bdon't know how to restore data location of\b",
            r"\bThe \w+ device module is not registered\.",
        ),
        restart="stop",
        means="The file remembers on which device each tensor lay, and `torch.load` puts it there again, or where "
        "`map_location` says: that device is not here.",
        fix="Pass `map_location='cpu'` to `torch.load`, and move the model afterwards. It also spares GPU memory.",
        example="RuntimeError: Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is "
        "False. If you are running on a CPU-only machine, please use torch.load with "
        "map_location=torch.device('cpu') to map your storages to the CPU.",
        seen="reproduced on torch 2.13",
        also={
            "fewer GPUs than before": "RuntimeError: Attempting to deserialize object on CUDA device 1 but "
            "torch.cuda.device_count() is 1. Please use torch.load with map_location to map your storages to an "
            "existing device.",
        },
    ),
    Signature(
        id="H1161",
        title="a device type that this build of torch, or of an extension, does not support",
        family="environment",
        rank=61,
        patterns=(
            r"\bPyTorch is not linked with support for \w+ devices",
            r"\bTorch not compiled with (?!CUDA)\w+ enabled",
            r"\bCannot get \w+ generator without\b(?! ATen_cuda)",
            r"\bPyTorch was compiled without (?!CUDA)\w+ support",
            r"\bCannot execute \w+\(\) without \w+ backend",
            r"\bCould not run '[\w:.]+' with arguments from the '(?:CUDA|HIP|MPS|XPU|HPU|XLA|MTIA)' backend",
        ),
        restart="stop",
        means="The program asks for MPS, XPU or another accelerator, and this build has no support for it; or an "
        "extension such as torchvision was built without CUDA.",
        fix="Install the build of torch, and of torchvision and others from the same source, for that accelerator; "
        "otherwise choose the device by `torch.accelerator.is_available()`.",
        example="RuntimeError: PyTorch is not linked with support for mps devices",
        seen="reproduced on torch 2.13",
        also={
            "a factory function": "NotImplementedError: Could not run 'aten::empty.memory_format' with arguments "
            "from the 'MPS' backend. This could be because the operator doesn't exist for this backend",
            "torchvision without CUDA": "NotImplementedError: Could not run 'torchvision::nms' with arguments from "
            "the 'CUDA' backend.",
        },
    ),
    Signature(
        id="H1162",
        title="a name that is no device",
        family="user code",
        rank=60,
        patterns=(
            r"\bInvalid device string: ",
            r"\bdevice type at start of device string: ",
            r"\bDevice string must not be empty",
            r"\bDevice index must (?:not be negative|be -1 or non-negative)",
        ),
        restart="stop",
        means="The text given as device is none: misspelt, with a space, or a number of an option taken as a name.",
        fix="Use 'cpu', 'cuda' or 'cuda:0'. Print the value: it mostly comes from a configuration or an option.",
        example="RuntimeError: Expected one of cpu, cuda, ipu, xpu, mkldnn, opengl, opencl, ideep, hip, ve, fpga, "
        "maia, xla, lazy, vulkan, mps, meta, hpu, mtia, privateuseone device type at start of device string: gpu",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1163",
        title="the values of a meta tensor were asked for: there are none",
        family="device",
        rank=59,
        patterns=(
            r"\bCannot copy out of meta tensor; no data!",
            r"\bcannot be called on meta tensors",
            r"_local_scalar_dense: attempted to run this operator with Meta tensors",
        ),
        restart="stop",
        means="The model was made on the device 'meta' (`with torch.device('meta')`, `init_empty_weights`, lazy "
        "loading) and never got weights.",
        fix="Call `model.to_empty(device=...)` and then load the state, or `load_state_dict(..., assign=True)`. In "
        "a Trainer do not move a model that was dispatched already.",
        example="NotImplementedError: Cannot copy out of meta tensor; no data! Please use "
        "torch.nn.Module.to_empty() instead of torch.nn.Module.to() when moving module from meta to a different "
        "device.",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1164",
        title="a GPU tensor given to numpy",
        family="device",
        rank=60,
        patterns=(r"\bcan't convert \S+ device type tensor to numpy",),
        restart="stop",
        means="numpy works in host memory only; metrics and plots are where this happens.",
        fix="Write `x.detach().cpu().numpy()`; better collect on the device and move once.",
        example="TypeError: can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor "
        "to host memory first.",
        seen="common in issues of many projects",
    ),
    Signature(
        id="H1168",
        title="an accelerator, or its pinned memory, asked for where there is none",
        family="device",
        rank=60,
        patterns=(
            r"\bCannot access accelerator device when none is available",
            r"\bNeed to provide pin_memory allocator to use pin memory",
            r"\bpin_memory=True requires a CUDA or other accelerator backend",
        ),
        restart="stop",
        means="A device was given by number (`.to(0)`, `.cuda(rank)`), or page-locked memory was asked for, and the "
        "process sees no accelerator.",
        fix="Ask `torch.accelerator.is_available()` first, and run on 'cpu' otherwise; "
        "`DataLoader(pin_memory=True)` does without by itself. If there is a GPU, install the wheel for it.",
        example="RuntimeError: Cannot access accelerator device when none is available.",
        seen="reproduced on torch 2.13",
        also={
            "pinned by argument": "RuntimeError: pin_memory=True requires a CUDA or other accelerator backend; no "
            "pinned memory allocator is available on this system.",
        },
    ),
)
