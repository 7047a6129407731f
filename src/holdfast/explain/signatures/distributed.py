"""Signatures of training with several processes: collectives, NCCL, gloo and DistributedDataParallel.

How processes are started and find each other lies in ``rendezvous``.
"""

from __future__ import annotations

from holdfast.explain.signature import Signature
from holdfast.explain.signatures.rendezvous import SIGNATURES as _RENDEZVOUS

# Those of rank 43 and 44 come before what says only that native code threw an exception: the text inside it counts.
_COLLECTIVES: tuple[Signature, ...] = (
    Signature(
        id="H921",
        title="a collective timed out: another rank is stuck, dead or elsewhere",
        family="distributed",
        role="cascade",
        rank=44,
        patterns=(
            r"\bWatchdog caught collective operation timeout",
            r"\bWork\w*\(SeqNum=\d+, [^\n]{0,200}\) timed out in blocking wait",
            r"\bWork\w*\(SeqNum=\d+, [^\n]{0,200}\) ran for \d+ milliseconds before timing out",
            r"\bTimed out waiting \d+ms for (?:recv|send) operation to complete",
            r"\bSome NCCL operations have failed or timed out",
            r"\bfailed to pass monitoredBarrier in \d+ ms",
            r"\btimed out in monitoredBarrier after \d+ ?ms",
            r"\bProcessGroupWrapper: Monitored Barrier encountered error",
            r"\bFuture for ProcessGroup abort timed out\b",
            r"\bHeartbeat monitor timed out\b",
            r"\bwatchdog got stuck for \d+ seconds",
            r"\bReceived a dump signal (?:from this local rank|due to a collective timeout)",
        ),
        restart="retry",
        means="A rank waited for the others and they did not come. The rank that says so is rarely the guilty one: "
        "look for the rank that failed first, runs another branch, has fewer batches, or hangs in its loader.",
        fix="Find the first error of any rank. Without one: equal numbers of batches (`drop_last`, `Join`), no "
        "collective inside `if rank == 0`, and a longer `timeout` in `init_process_group` for slow saving or first "
        "compilation.",
        example="[rank0]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective "
        "operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=466119168, NumelOut=466119168, "
        "Timeout(ms)=600000) ran for 600060 milliseconds before timing out.",
        seen="LlamaFactory#7396, pytorch#118369, nccl#1409; the gloo texts reproduced on torch 2.13",
        also={
            "torch 1.13, OFA#271": "[E ProcessGroupNCCL.cpp:737] [Rank 1] Watchdog caught collective operation "
            "timeout: WorkNCCL(SeqNum=469508, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1802212 milliseconds "
            "before timing out.",
            "torch 2.5, uncaught": "terminate called after throwing an instance of 'c10::DistBackendError'\n  "
            "what():  [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with "
            "exception: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=808, "
            "OpType=ALLREDUCE, NumelIn=9801523, NumelOut=9801523, Timeout(ms)=600000) ran for 600020 milliseconds "
            "before timing out.",
            "gloo, torch 2.13": "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] "
            "Timed out waiting 3000ms for recv operation to complete",
            "monitored_barrier, torch 2.13": "RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in "
            "2000 ms",
        },
    ),
    Signature(
        id="H922",
        title="the connection to another rank broke: it ended or the network failed",
        family="distributed",
        role="cascade",
        rank=44,
        patterns=(
            r"\bncclRemoteError\b",
            r"\bremote process exited or there was a network error",
            r"gloo/transport/[^\n]{0,80}\bConnection (?:closed|reset) by peer",
            r"gloo/transport/[^\n]{0,80}\b(?:Broken pipe|Connection refused|writev|readv)\b",
            r"\bNCCL WARN [^\n]{0,120}\bConnection (?:closed by remote|reset by) peer",
            r"\bNCCL WARN [^\n]{0,120}\bfailed : Broken pipe",
            r"\bNET/IB ?: Got completion from peer [^\n]{0,60} with (?:error|status)\b",
            r"\bConnection was likely closed\. Did the remote server shutdown or crash\?",
            r"\bGloo connectFullMesh failed with\b",
        ),
        restart="retry",
        means="The other side of a connection went away. It follows from the end of another rank, whose own error "
        "came first; only without one was it the network.",
        fix="Read the first error of the other ranks, and their exit status. If all were healthy: check the "
        "interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), the fabric and the firewall, and try again.",
        example="torch.distributed.DistBackendError: NCCL error in: "
        "/pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote process exited or there was a network "
        "error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error or a remote "
        "process exiting prematurely.\nLast error:\nsocketProgressOpt: Call to recv from 172.16.0.1<33759> failed : "
        "Connection reset by peer",
        seen="nccl#2076, nccl#795; the gloo texts reproduced on torch 2.13",
        also={
            "gloo, torch 2.13": "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read "
            "error [127.0.0.1]:42390: Connection reset by peer. This is typically caused by a remote worker hanging "
            "or bugs in the application.",
            "store, torch 2.13": "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was "
            "likely closed. Did the remote server shutdown or crash?",
        },
    ),
    Signature(
        id="H923",
        title="a CUDA or system call failed inside NCCL",
        family="distributed",
        rank=43,
        patterns=(
            r"\bncclUnhandledCudaError\b",
            r"\bncclSystemError\b",
            r"\bncclInternalError\b",
            r"\bNCCL error in: [^\n]{0,200}(?:unhandled (?:cuda|system) error|internal error)",
        ),
        restart="retry",
        means="NCCL met an error of CUDA, of a socket or of shared memory and only passes it on. 'Last error' in "
        "the same text, or NCCL_DEBUG=INFO, names it.",
        fix="Run once with NCCL_DEBUG=INFO and read the first WARN line. Usual: wrong interface "
        "(NCCL_SOCKET_IFNAME), small /dev/shm in a container (`--shm-size=8g`), a GPU used by two ranks, a driver "
        "too old.",
        example="torch.distributed.DistBackendError: NCCL error in: "
        "/pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1333, unhandled cuda error (run with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.18.1\nncclUnhandledCudaError: Call to CUDA function failed.\n"
        "Last error:\nCuda failure 999 'unknown error'",
        seen="nccl#1410, nccl#1657, pytorch#170045",
        also={
            "system error, nccl#697": "ncclSystemError: System call (socket, malloc, munmap, etc) failed.",
            "torch 1.8, SlowFast#462": "RuntimeError: NCCL error in: "
            "/pytorch/torch/lib/c10d/ProcessGroupNCCL.cpp:911, unhandled cuda error, NCCL version 2.7.8",
        },
    ),
    Signature(
        id="H924",
        title="the NCCL communicator was aborted, after an error elsewhere",
        family="distributed",
        role="cascade",
        rank=43,
        patterns=(
            r"\bNCCL communicator (?:was|has been) aborted",
            r"\bwas aborted on rank \d+\b",
            r"\bTo avoid data inconsistency, we are taking the entire process down",
            r"\bNCCL watchdog thread terminated with exception(?!: \[Rank \d+\] Watchdog caught)",
        ),
        restart="retry",
        means="The watchdog of torch took the communicator down after a time-out or an error. It is the last link "
        "of the chain, not the first.",
        fix="Read what was said before it, on all ranks: the original reason stands there.",
        example="torch.distributed.DistBackendError: NCCL communicator was aborted on rank 0.",
        seen="Search-R1#170; wording of torch 2",
        also={
            "torch 1.13": "RuntimeError: NCCL communicator was aborted on rank 1.  Original reason for failure was: "
            "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, "
            "Timeout(ms)=1800000) ran for 1802212 milliseconds before timing out.",
        },
    ),
    Signature(
        id="H925",
        title="DDP: some parameters got no gradient",
        family="distributed",
        patterns=(
            r"\bExpected to have finished reduction in the prior iteration before starting a new one",
            r"\bLightningModule has parameters that were not used in producing the loss",
        ),
        restart="stop",
        means="DistributedDataParallel waits for a gradient of every parameter, and the last backward left some "
        "out: a branch or head that was not used, or an output that is not part of the loss.",
        fix="TORCH_DISTRIBUTED_DEBUG=DETAIL names the parameters. Use or remove them; if they are unused only at "
        "times: `find_unused_parameters=True`. Every output of `forward` must enter the loss.",
        example="RuntimeError: Expected to have finished reduction in the prior iteration before starting a new "
        "one. This error indicates that your module has parameters that were not used in producing loss. You can "
        "enable unused parameter detection by passing the keyword argument `find_unused_parameters=True` to "
        "`torch.nn.parallel.DistributedDataParallel`, and by \nmaking sure all `forward` function outputs "
        "participate in calculating loss.",
        seen="reproduced on torch 2.13; pytorch#43259",
    ),
    Signature(
        id="H928",
        title="the ranks run different collectives",
        family="distributed",
        patterns=(r"\bDetected mismatch between collectives on ranks",),
        restart="stop",
        means="One rank took another branch, or skipped or repeated a collective, or passes another shape. Without "
        "the detail mode this is a hang or silently wrong numbers.",
        fix="The text names both collectives and their sequence numbers. Look for a collective inside `if rank == "
        "0`, for loops of different length, and for metrics that only some ranks have.",
        example="RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running collective: "
        "CollectiveFingerPrint(SequenceNumber=0, OpType=ALLREDUCE, TensorShape=[1], TensorDtypes=Float, "
        "TensorDeviceTypes=TensorOptions(dtype=float (default), device=cpu, layout=Strided (default), "
        "requires_grad=false (default), pinned_memory=false (default), memory_format=(nullopt))), but Rank 0 is "
        "running collective: CollectiveFingerPrint(SequenceNumber=0, OpType=REDUCE, TensorShape=[1], "
        "TensorDtypes=Float, TensorDeviceTypes=TensorOptions(dtype=float (default), device=cpu, layout=Strided "
        "(default), requires_grad=false (default), pinned_memory=false (default), "
        "memory_format=(nullopt))).Collectives differ in the following aspects: \t Op type: ALLREDUCEvs REDUCE",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1125",
        title="the ranks pass tensors of different sizes to a collective",
        family="distributed",
        rank=43,
        patterns=(
            r"\bop\.preamble\.length <= op\.nbytes",
            r"\bop\.nwritten == op\.preamble\.nbytes",
            r"\bop\.preamble\.roffset \+ op\.preamble\.length <= op\.buf->size_",
            r"\bMismatched collective detected\b",
        ),
        restart="stop",
        means="gloo received more bytes than it expects. A last batch of another size, a metric per sample, or a "
        "variable number of detections are typical; smaller ones go unnoticed and give wrong numbers.",
        fix="Pad to one size first, or gather the sizes (`all_gather_object`, or one `all_gather` of the lengths). "
        "TORCH_DISTRIBUTED_DEBUG=DETAIL names the shapes.",
        example="terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  [enforce fail at "
        "/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 40 vs 16. "
        "Received data size doesn't match expected size. Is there a distributed collective mismatch in your code?",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1126",
        title="DDP: the model is not the same on all ranks",
        family="distributed",
        patterns=(
            r"\bDDP expects same model across all ranks",
            r"\bappears not to match (?:sizes|strides) of the same param in process 0",
        ),
        restart="stop",
        means="The ranks built models with another number or shape of parameters: a vocabulary, number of classes "
        "or branch that was read from the rank's own part of the data.",
        fix="Compute such sizes from the whole data or on rank 0, and broadcast them before the model is built.",
        example="RuntimeError: DDP expects same model across all ranks, but Rank 0 has 2 params, while rank 1 has "
        "inconsistent 4 params.",
        seen="reproduced on torch 2.13",
        also={
            "shapes": "RuntimeError: [1]: params[0] in this process with sizes [110, 8] appears not to match sizes "
            "of the same param in process 0.",
        },
    ),
    Signature(
        id="H1127",
        title="DDP: a parameter became ready twice in one backward",
        family="distributed",
        patterns=(
            r"\bExpected to mark a variable ready only once",
            r"\bhas been marked as ready twice\b",
            r"\bYour training graph has changed in this iteration, e\.g\., one parameter is (?:un)?used in first",
        ),
        restart="stop",
        means="A parameter is used outside `forward`, or by recomputed (checkpointed, reentrant) blocks that share "
        "it, so its hook ran twice.",
        fix="Checkpoint with `use_reentrant=False`. Call only the wrapped model, once per backward; with shared "
        "blocks and an unchanging graph: `static_graph=True`.",
        example="RuntimeError: Expected to mark a variable ready only once. This error is caused by one of the "
        "following reasons: 1) Use of a module parameter outside the `forward` function.",
        seen="reproduced on torch 2.13",
        also={
            "static graph": "RuntimeError: Your training graph has changed in this iteration, e.g., one parameter "
            "is unused in first iteration, but then got used in the second iteration. this is not compatible with "
            "static_graph set to True.",
        },
    ),
    Signature(
        id="H1128",
        title="DDP around a model of which nothing is trained",
        family="distributed",
        patterns=(r"\bDistributedDataParallel is not needed when a module doesn't have any parameter",),
        restart="stop",
        means="All parameters are frozen, or the module has none, so there is nothing to reduce.",
        fix="Do not wrap it; or unfreeze what should be trained before wrapping.",
        example="RuntimeError: DistributedDataParallel is not needed when a module doesn't have any parameter that "
        "requires a gradient.",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1132",
        title="wrong arguments of a collective",
        family="distributed",
        patterns=(
            r"\bInvalid function argument\. Expected parameter `\w+` of type",
            r"\bInvalid function argument: output_tensor_lists should be a list",
            r"\bArgument ``(?:gather|scatter)_list`` must (?:NOT )?be specified on",
            r"\bProcessGroupGloo::\w+: (?:invalid|requires|incorrect|tensors must|input|output|unsupported)",
            r"\bInvalid usage of tensors with different dtypes",
            r"\bCannot use ReduceOp\.\w+ with\b",
            r"\bUnsupported data type for NCCL process group\b",
            r"\bNumber of tensor splits not equal to group size|\bSplit sizes doesn't match total dim 0 size",
            r"\bdim 0 does not divide equally across group size",
            r"\bTensors must be (?:CUDA and dense|contiguous)\b",
            r"\bsource rank must provide non-None scatter_object_input_list",
            r"\bMust provide object_gather_list on dst rank",
            r"\bscatter_object_output_list to be a list of size at least 1",
            r"\ball_reduce does not support \S+ on complex tensors",
        ),
        restart="stop",
        means="The call itself is wrong: no tensor, a list of the wrong length, a type or operation that the "
        "backend does not have, or lists given on the wrong rank.",
        fix="Compare the call with the documentation of that collective: one list entry per rank, the list only on "
        "the source or destination, contiguous tensors of one type on the device of the backend.",
        example="TypeError: Invalid function argument. Expected parameter `tensor` of type torch.Tensor\n"
        "             but got <class 'float'> instead.",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1143",
        title="a plain tensor mixed with a distributed one (DTensor)",
        family="distributed",
        patterns=(r"\bgot mixed torch\.Tensor and DTensor",),
        restart="stop",
        means="After `fully_shard` or tensor parallelism the parameters are DTensors, and an operation met a plain "
        "tensor.",
        fix="Make the other one a DTensor (`distribute_tensor`), or take `.full_tensor()` or `.to_local()` of the "
        "parameter; clip with `torch.nn.utils.clip_grad_norm_` on all of one kind.",
        example="RuntimeError: aten.add.Tensor got mixed torch.Tensor and DTensor, need to convert all torch.Tensor "
        "to DTensor before calling distributed operators! Please see "
        "https://docs.pytorch.org/docs/main/distributed.tensor.html#mixed-tensor-and-dtensor-operations for more "
        "details.",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1144",
        title="two ranks use the same GPU",
        family="distributed",
        rank=64,
        patterns=(r"\bDuplicate GPU detected ?: rank \d+ and rank \d+ both on CUDA device",),
        restart="stop",
        means="NCCL allows one rank per GPU and communicator. Mostly `torch.cuda.set_device(local_rank)` is "
        "missing, or more processes than GPUs were started.",
        fix="Call `torch.cuda.set_device(int(os.environ['LOCAL_RANK']))` before `init_process_group`; match "
        "`--nproc-per-node` with the number of GPUs.",
        example="ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\nDuplicate GPU "
        "detected : rank 1 and rank 0 both on CUDA device 6000",
        seen="common in issues of many projects; needs GPUs, not reproduced here",
    ),
    Signature(
        id="H1145",
        title="shared memory is too small for NCCL",
        family="storage",
        rank=45,
        patterns=(
            r"\bfailed to extend /dev/shm/nccl-",
            r"\bNCCL WARN Error while (?:creating|attaching to) shared memory segment",
            r"\bNCCL WARN Call to posix_fallocate failed ?: No space left on device",
        ),
        restart="stop",
        means="NCCL keeps buffers in /dev/shm; containers get 64 MB by default.",
        fix="Start the container with `--shm-size=8g` or `--ipc=host` (Kubernetes: an emptyDir with medium Memory), "
        "and remove old /dev/shm/nccl-* files. NCCL_SHM_DISABLE=1 avoids it at some speed.",
        example="worker-0:202016:202235 [0] misc/shmutils.cc:88 NCCL WARN Error: failed to extend "
        "/dev/shm/nccl-WU88OE to 9637892 bytes, error: No space left on device (28)",
        seen="pytorch/ci-infra#490, nccl#525",
    ),
)

SIGNATURES: tuple[Signature, ...] = (*_COLLECTIVES, *_RENDEZVOUS)
