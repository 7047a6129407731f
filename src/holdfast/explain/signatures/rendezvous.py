"""Signatures of processes that do not start or do not find each other: launchers, stores, ports, groups and meshes.

Part of ``distributed``, whose tuple holds them too.
"""

from __future__ import annotations

from holdfast.explain.signature import Signature

SIGNATURES: tuple[Signature, ...] = (
    Signature(
        id="H926",
        title="a collective before init_process_group, or after its end",
        family="distributed",
        patterns=(
            r"\bDefault process group has not been initialized",
            r"\bInvalid process group specified(?: or has been destroyed)?",
            r"\bProcess group cannot be None\b",
        ),
        restart="stop",
        means="torch.distributed is used and there is no process group: the script was started without a launcher, "
        "the call comes too early, or the group was destroyed already.",
        fix="Call `init_process_group` first, once per process. For code that also runs alone: ask "
        "`torch.distributed.is_initialized()` before.",
        example="ValueError: Default process group has not been initialized, please make sure to call "
        "init_process_group.",
        seen="reproduced on torch 2.13",
        also={
            "torch 1": "RuntimeError: Default process group has not been initialized, please make sure to call "
            "init_process_group.",
        },
    ),
    Signature(
        id="H927",
        title="the port for the rendezvous is in use or not allowed",
        family="distributed",
        patterns=(
            r"\bThe server socket has failed to (?:listen|bind)\b",
            r"\bEADDRINUSE\b",
            r"\baddress already in use\b",
        ),
        restart="retry",
        means="Another program listens on that port: mostly an earlier run of which processes are left, or a second "
        "run on the same machine with the default port 29500.",
        fix="Look for left-over processes (`ss -ltnp`) and end them. Give each run its own port: `torchrun "
        "--standalone` or `--master-port` chooses one.",
        example="torch.distributed.DistNetworkError: The server socket has failed to listen on any local network "
        "address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
        seen="reproduced on torch 2.13",
        also={
            "torch 1.13": "RuntimeError: The server socket has failed to listen on any local network address. The "
            "server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).",
        },
    ),
    Signature(
        id="H1120",
        title="a process of the launcher failed without saying why",
        family="distributed",
        role="cascade",
        rank=92,
        patterns=(
            r"\bChildFailedError\b",
            r"\bfailed \(exitcode: -?\d+\) local_rank: \d+ \(pid: \d+\) of binary",
        ),
        restart="retry",
        means="torchrun saw a worker end and stopped the others. The table shows which rank failed first and with "
        "which exit code; the reason stands in the output of that rank.",
        fix="Read the traceback of the rank under 'Root Cause'. If there is none: a negative code is a signal (-9 "
        "mostly memory, -11 a native crash). `--redirects 3 --log-dir logs` keeps the output of each rank.",
        example="E1121 22:13:24.124000 11619 torch/distributed/elastic/multiprocessing/api.py:1002] failed "
        "(exitcode: 3) local_rank: 1 (pid: 11661) of binary: /usr/bin/python",
        seen="reproduced on torch 2.13",
        also={
            "the exception": "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        },
    ),
    Signature(
        id="H1121",
        title="the environment lacks what init_process_group reads",
        family="distributed",
        patterns=(
            r"\benvironment variable (?:RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT) expected, but not set",
            r"\brendezvous: (?:rank|world size|port number|path) (?:parameter )?missing",
            r"\bNo rendezvous handler for \S*://",
            r"\bport must have value from 0 to 65535",
            r"\bPort out of range 0-65535",
        ),
        restart="stop",
        means="With `env://` the address, port, rank and number of processes come from the environment, which a "
        "launcher sets. One of them is missing or impossible.",
        fix="Start with `torchrun --nproc-per-node=N train.py`, which sets them. For one process by hand: "
        "MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 RANK=0 WORLD_SIZE=1.",
        example="ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable "
        "RANK expected, but not set",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1122",
        title="not all ranks met: a rendezvous or store timed out",
        family="distributed",
        rank=78,
        patterns=(
            r"\bTimed out after \d+ seconds waiting for clients",
            r"\bThe client socket has timed out after \S+ while trying to connect to",
            r"\bThe client socket has failed to connect to any network address",
            r"\bfailed to connect/validate to host [^\n]{0,120} - timed out",
            r"\bwait timeout after \d+ms, keys: ",
            r"\bTimed out initializing process group in store based barrier",
            r"\bRendezvousTimeoutError\b",
            r"\bRendezvousConnectionError\b",
            r"\bThe connection to the C10d store has failed",
            r"\bbarrier timeout after \d+ms",
            r"\bbarrier failed -- missing ranks",
            r"^(?:RuntimeError: )?Wait timeout$",
        ),
        restart="retry",
        means="Fewer processes came than `world_size` says, or they cannot reach the address of rank 0: a node that "
        "did not start, a firewall, a wrong MASTER_ADDR or port, or a rank that failed before.",
        fix="Count the processes that started, and look for a rank that ended early. From another node try `nc -vz "
        "MASTER_ADDR MASTER_PORT`. Then the same `--nnodes` and `--rdzv-endpoint` on all nodes.",
        example="torch.distributed.DistStoreError: Timed out after 3 seconds waiting for clients. 1/2 clients "
        "joined.",
        seen="reproduced on torch 2.13",
        also={
            "client": "torch.distributed.DistNetworkError: The client socket has timed out after 300000ms while "
            "trying to connect to (10.0.0.1, 29500).",
            "torch 1.13": "RuntimeError: Timed out initializing process group in store based barrier on rank: 0, "
            "for key: store_based_barrier_key:1 (world_size=2, worker_count=1, timeout=0:30:00)",
        },
    ),
    Signature(
        id="H1129",
        title="a rank that does not exist in the group",
        family="distributed",
        rank=68,
        patterns=(
            r"\bGlobal rank -?\d+ is not part of group\b",
            r"\bGroup rank -?\d+ is not part of group\b",
            r"\bthe new group's (?:world size|rank) should be (?:less or equal|within)",
            r"\branks list must not contain duplicate entries",
            r"\bInvalid (?:source|destination) rank: ",
            r"\bProcessGroupGloo::\w+: invalid root rank",
            r"\binvalid (?:src|dst|root) rank\b",
            r"\brank \d+ must be less than world size|\bInvalid rank specified\b",
        ),
        restart="stop",
        means="A source, destination or member was given by a number outside the group: a fixed rank from a larger "
        "machine, counting from 1, or a global rank where one of the group is meant.",
        fix="Ranks go from 0 to world_size - 1. In a subgroup `src` and `dst` are global ranks unless `group_src` "
        "and `group_dst` are used.",
        example="RuntimeError: ProcessGroupGloo::broadcast: invalid root rank: 3",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1130",
        title="init_process_group called twice",
        family="distributed",
        patterns=(r"\btrying to initialize the default process group twice",),
        restart="stop",
        means="There is a default process group already: a library (Trainer, Accelerate, Lightning) or an earlier "
        "cell made it.",
        fix="Call it only `if not torch.distributed.is_initialized()`, and `destroy_process_group()` at the end.",
        example="ValueError: trying to initialize the default process group twice!",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1131",
        title="a backend that this torch or machine does not have",
        family="distributed",
        patterns=(
            r"\bDistributed package doesn't have \w+ built in",
            r"\bProcessGroupNCCL is only supported with GPUs, no GPUs found",
            r"\bUnknown backend '?\w+",
            r"\bUnknown c10d backend type",
            r"\bInvalid device:backend pairing",
            r"\bNo backend type associated with device type\b",
            r"\bCould not find the default backend type\b",
        ),
        restart="stop",
        means="NCCL needs a CUDA build and GPUs, MPI a build of its own; or the tensors are on a device for which "
        "the group has no backend.",
        fix="Use `backend='gloo'` on CPUs; leave the backend out, so that torch chooses by device; move the tensor "
        "to the device of the backend.",
        example="RuntimeError: Distributed package doesn't have NCCL built in",
        seen="reproduced on torch 2.13",
        also={
            "no GPU": "ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
        },
    ),
    Signature(
        id="H1135",
        title="the address of rank 0 cannot be resolved",
        family="distributed",
        rank=69,
        patterns=(r"\bnetwork addresses of \([^)\n]{0,200}\) cannot be retrieved", r"\bgai error: -\d+"),
        restart="retry",
        means="MASTER_ADDR or the endpoint is a name that this machine cannot look up: misspelt, of another "
        "network, or not yet known when the pods start.",
        fix="Try `getent hosts NAME` on every node; use an IP address; in Kubernetes a headless service.",
        example="[W1121 22:06:13.001554997 socket.cpp:764] [c10d] The IPv6 network addresses of (node-7.invalid, "
        "29500) cannot be retrieved (gai error: -2 - Name or service not known).",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1136",
        title="no network interface of that name",
        family="distributed",
        patterns=(
            r"\bUnable to find address for: ",
            r"\bUnable to find interface for: ",
            r"\bBootstrap : no socket interface found",
            r"\bUnable to resolve hostname to a \(local\) address",
        ),
        restart="stop",
        means="GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names an interface that this node does not have.",
        fix="`ip -brief address` shows the names; set the variable per node, or remove it.",
        example="RuntimeError: [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/device.cc:84] ifa != "
        "nullptr. Unable to find address for: ib7",
        seen="reproduced on torch 2.13",
        also={"NCCL": "worker-0:151:151 [0] NCCL INFO Bootstrap : no socket interface found"},
    ),
    Signature(
        id="H1137",
        title="a spawned process ended without an exception",
        family="distributed",
        role="cascade",
        rank=91,
        patterns=(
            r"^process \d+ terminated with (?:exit code \d+|signal SIG\w+)",
            r"\bProcessExitedException: process \d+",
        ),
        restart="retry",
        means="A process of `torch.multiprocessing.spawn` called exit or was killed by a signal; what it did before "
        "stands above, if anywhere.",
        fix="SIGKILL: look at memory first. SIGSEGV: run with `python -X faulthandler`. An exit code: search for "
        "`sys.exit` and `os._exit` in the code of the process.",
        example="torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGKILL",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1142",
        title="a device mesh that does not fit the number of processes",
        family="distributed",
        patterns=(
            r"\bMesh should not be bigger than default world size",
            r"\bDeviceMesh only support homogeneous hardware",
            r"\bbut found \d+ ranks!",
        ),
        restart="stop",
        means="The product of the mesh's sizes (data, tensor, pipeline parallel) is more than the processes that "
        "were started.",
        fix="Start that many processes, or make one of the sizes smaller.",
        example="RuntimeError: Mesh should not be bigger than default world size 1, but found 8 ranks!",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1146",
        title="a script for torchrun, started without it",
        family="environment",
        rank=60,
        patterns=(r"^'?(?:LOCAL_RANK|RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)'?$",),
        exceptions=("KeyError",),
        only_exceptions=True,
        restart="stop",
        means="The script reads LOCAL_RANK or its like from the environment, and nobody has set it.",
        fix="Start it with `torchrun --nproc-per-node=N train.py`; for one process read it with a default: "
        "`os.environ.get('LOCAL_RANK', 0)`.",
        example="Traceback (most recent call last):\n"
        '  File "train.py", line 5, in <module>\n'
        '    local_rank = int(os.environ["LOCAL_RANK"])\n'
        "KeyError: 'LOCAL_RANK'",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1147",
        title="torchrun was told to end by a signal",
        family="preempted",
        rank=42,
        patterns=(
            r"\bSignalException: Process \d+ got signal: \d+",
            r"^Process \d+ got signal: \d+$",
            r"\bReceived (?:(?:Signals\.)?SIG\w+|\d+) death signal, shutting down workers",
        ),
        restart="preempted",
        means="The launcher itself got SIGTERM (15), SIGHUP (1) or SIGINT (2) and ended its workers: the scheduler "
        "took the job back, the terminal or connection was closed, or somebody stopped it. No rank was at fault.",
        fix="Signal 1: start it inside tmux, or with `nohup`. Signal 15: look at the time limit and at preemption "
        "of the scheduler, save in the grace time and requeue.",
        example="torch.distributed.elastic.multiprocessing.api.SignalException: Process 4711 got signal: 15",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1169",
        title="DDP of a CPU model with device_ids",
        family="distributed",
        patterns=(
            r"\bDistributedDataParallel device_ids and output_device arguments only work with",
            r"\bdevice_ids can only be None or contain a single element",
            r"\binput module must be on the same type of devices",
        ),
        restart="stop",
        means="`device_ids=[rank]` is for a model on that GPU; this one is on the CPU, or on several kinds of "
        "devices.",
        fix="Leave `device_ids` out on CPUs; on GPUs move the model first: `model.to(local_rank)`.",
        example="ValueError: DistributedDataParallel device_ids and output_device arguments only work with "
        "single-device/multiple-device GPU modules or CPU modules, but got device_ids [0], output_device None, and "
        "module parameters {device(type='cpu')}.",
        seen="reproduced on torch 2.13",
    ),
)
