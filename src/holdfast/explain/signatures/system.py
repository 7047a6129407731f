"""Signatures of the machine around the training: disks, files, permissions, networks, schedulers.

Signals lie in ``runtime``; what is inside of files in ``data_files``; compiled code in ``native_code``.
"""

from __future__ import annotations

from holdfast.explain.signature import Signature

SIGNATURES: tuple[Signature, ...] = (
    Signature(
        id="H981",
        title="the disk or the quota is full",
        family="storage",
        rank=40,
        patterns=(
            (
                r"(?s)\A(?!.*(?:/dev/shm|</torch_|shared memory)).*(?:\bNo space left on device\b|\bENOSPC\b|"
                r"\[Errno 28\])"
            ),
            r"\bDisk quota exceeded\b|\[Errno 122\]",
            r"\bnot enough free space to write\b|\b\d+ requested and \d+ written\b",
            r"\bThere is not enough space on the disk\b",
        ),
        means="A write failed since the file system, or the share of this user in it, is full. It may be another "
        "disk than thought: `/tmp`, the home folder, a cache.",
        fix="`df -h` and `quota -s` for the path in the message, `df -i` for the number of files. Remove old "
        "checkpoints and caches, keep only the newest few, then start again.",
        false_positives="`/dev/shm` full: then the text names shared memory.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nOSError: [Errno '
        "28] No space left on device",
        seen="reproduced on torch 2.13",
        also={
            "quota": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nOSError: '
            "[Errno 122] Disk quota exceeded: '/home/user/.cache/huggingface'",
            "numpy 2": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nOSError: '
            "1000000 requested and 0 written",
        },
    ),
    Signature(
        id="H988",
        title="a file or folder is missing or may not be used",
        family="storage",
        rank=72,
        patterns=(
            r"\[Errno 2\] No such file or directory\b",
            r"\[Errno 13\] Permission denied\b",
            r"\bNo such file or directory\b",
            r"\bPermission denied\b",
            r"\[Errno 1\] Operation not permitted\b",
            r"\b(?:File|Path|Directory|Folder) [^\n]{0,200} (?:does not exist|not found|doesn't exist)\b",
            r"\b(?:filename|file|path|directory|folder) [^\n]{1,200} does not exist\b",
        ),
        exceptions=(
            "FileNotFoundError",
            "PermissionError",
            "OSError",
            "RuntimeError",
            "ValueError",
            "NoSuchFile",
        ),
        only_exceptions=True,
        means="A path does not exist as seen from this process, or belongs to another user: a relative path from "
        "another working directory, a disk that is not mounted, a container without that folder, a program that is "
        "not installed.",
        fix="Take the path of the message and try `ls -l` on it as the same user, on the same node, in the same "
        "container. Make paths absolute, and check them at the start of the script.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nFileNotFoundError: '
        "[Errno 2] No such file or directory: 'configs/base.yaml'",
        seen="reproduced on torch 2.13",
        also={
            "permission": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "PermissionError: [Errno 13] Permission denied: '/shared/checkpoints/last.pt'",
        },
    ),
    Signature(
        id="H990",
        title="ended by the scheduler: time limit or preemption",
        family="preempted",
        rank=15,
        restart="preempted",
        patterns=(
            r"\bDUE TO (?:TIME LIMIT|PREEMPTION|NODE FAILURE|JOB REQUEUE)\b",
            r"\bslurmstepd: error: \*\*\* (?:JOB|STEP) [\w.+]+ ON \S+ CANCELLED AT\b",
            r"\bJob step aborted: Waiting up to \d+ seconds for job step to finish\b",
            r"\bPBS: job killed: walltime \d+ exceeded limit \d+",
            r"\bTERM_RUNLIMIT: job killed after reaching LSF run time limit",
            r"\bjob killed after reaching LSF (?!memory)",
            r"\b(?:instance|node|machine|VM) (?:is being|was|will be) (?:preempted|reclaimed|evicted)\b",
            r"\bThe node was low on resource: ",
        ),
        means="The job reached its time limit, was preempted for another one, or its node was taken away. Nothing "
        "is wrong with the training.",
        fix="Queue it again and resume; ask for the signal some minutes before the end (`#SBATCH "
        "--signal=B:TERM@300`) so that a checkpoint is saved in time, which a Guard does. If it was the time "
        "limit, ask for more or save more often.",
        example="slurmstepd: error: *** JOB 4711 ON node17 CANCELLED AT 2026-03-01T04:12:09 DUE TO TIME LIMIT ***",
        seen="text of Slurm; not reproduced, no scheduler here",
        also={
            "PBS": "=>> PBS: job killed: walltime 3637 exceeded limit 3600",
            "LSF": "TERM_RUNLIMIT: job killed after reaching LSF run time limit.",
        },
    ),
    Signature(
        id="H1344",
        title="a file grew beyond the limit of this process",
        family="storage",
        rank=42,
        patterns=(r"\[Errno 27\] File too large", r"\bFile size limit exceeded\b"),
        means="A limit of the file size is set for the process (`ulimit -f`), or the file system takes no larger "
        "files (4 GiB on FAT).",
        fix="`ulimit -f` in the same shell or job; raise it or unset it. Split the file or write to another file "
        "system.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nOSError: [Errno '
        "27] File too large",
        seen="reproduced on torch 2.13",
        also={
            "shell": "File size limit exceeded (core dumped)",
        },
    ),
    Signature(
        id="H1345",
        title="a path is of the wrong kind: a folder for a file, a name too long, something there already",
        family="storage",
        patterns=(
            r"\[Errno 21\] Is a directory",
            r"\[Errno 20\] Not a directory",
            r"\[Errno 17\] File exists",
            r"\[Errno 36\] File name too long",
            r"\[Errno 39\] Directory not empty",
            r"\[Errno 40\] Too many levels of symbolic links",
            r"\b(?:Output|Checkpoint|Run)?\s?(?:directory|folder) [^\n]{0,200} already exists\b",
        ),
        only_exceptions=True,
        means="A folder was given where a file is needed or the reverse, a folder of an earlier run exists, or a "
        "name made of all settings is longer than 255 bytes.",
        fix="Check the path in the message. For folders of runs use `mkdir(parents=True, exist_ok=True)` and a "
        "name with the time; keep settings in a file rather than in the name.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nIsADirectoryError: '
        "[Errno 21] Is a directory: 'run1'",
        seen="reproduced on torch 2.13",
        also={
            "exists": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "FileExistsError: [Errno 17] File exists: 'runs/baseline'",
        },
    ),
    Signature(
        id="H1346",
        title="a disk or network file system fails",
        family="storage",
        rank=38,
        restart="retry",
        patterns=(
            r"\[Errno 5\] Input/output error",
            r"\[Errno 116\] Stale file handle",
            r"\[Errno 107\] Transport endpoint is not connected",
            r"\[Errno 121\] Remote I/O error",
            r"\[Errno 112\] Host is down",
            r"\b(?:Stale NFS file handle|Stale file handle|Transport endpoint is not connected)\b",
            r"\bBuffer I/O error on dev\b|\bEXT4-fs error\b|\bXFS \([\w-]+\): [^\n]{0,60}(?:error|shutdown)",
        ),
        means="The storage itself failed to read or write: a disk that dies, a network mount that went away, a "
        "file replaced on the server while it was open.",
        fix="Try `ls` and `dd if=FILE of=/dev/null` on the node; look at the kernel log. Mount it again or leave "
        "the node; copy data to a local disk before training, and check the newest checkpoint before using it.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nOSError: [Errno 5] '
        "Input/output error",
        seen="reproduced on torch 2.13",
        also={
            "network disk": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "OSError: [Errno 116] Stale file handle: '/mnt/data/train.h5'",
        },
    ),
    Signature(
        id="H1347",
        title="the file system is read-only",
        family="storage",
        rank=42,
        patterns=(r"\[Errno 30\] Read-only file system", r"\bRead-only file system\b"),
        means="The folder is mounted read-only: a container image, a volume mounted with `:ro`, or a disk that the "
        "kernel set read-only after errors.",
        fix="Write to another folder, or mount the volume with write permission. If it was writable before, look "
        "at the kernel log for errors of the disk first.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\nOSError: [Errno '
        "30] Read-only file system: '/data/checkpoints'",
        seen="reproduced on torch 2.13",
    ),
    Signature(
        id="H1348",
        title="a download or a service cannot be reached",
        family="environment",
        rank=71,
        restart="retry",
        patterns=(
            r"\burlopen error \[Errno -?\d+\]|\burlopen error (?:timed out|\[SSL)",
            r"\bHTTP Error (?:4\d\d|5\d\d): ",
            r"\b(?:4\d\d|5\d\d) (?:Client|Server) Error: ",
            r"\bMax retries exceeded with url\b",
            r"\b(?:Temporary failure in name resolution|Name or service not known|nodename nor servname provided)\b",
            r"\bCERTIFICATE_VERIFY_FAILED\b",
            r"\bCouldn't (?:reach|connect to) '?(?:https?://|the Hub)",
            r"\bWe couldn't connect to 'https?://",
            r"\bNetwork is unreachable\b",
            r"\A(?:\w+: )?(?:timed out|The read operation timed out|Read timed out\.?)\Z",
            r"\bConnection refused\b",
            r"\bRead timed out\. \(read timeout=",
            r"\bRemote end closed connection without response\b",
        ),
        exceptions=(
            "URLError",
            "HTTPError",
            "ConnectionError",
            "ConnectionRefusedError",
            "gaierror",
            "timeout",
            "TimeoutError",
            "OSError",
            "SSLError",
            "SSLCertVerificationError",
            "ReadTimeout",
            "ConnectTimeout",
            "LocalEntryNotFoundError",
            "RemoteDisconnected",
            "IncompleteRead",
        ),
        only_exceptions=True,
        means="A host name cannot be resolved, nobody listens there, the page is gone or the server is busy. "
        "Compute nodes often have no network to the outside.",
        fix="Try `curl -I` with the address on the same node. Download before the job and give local paths; set "
        "the offline variables of the libraries (`HF_HUB_OFFLINE=1`, `WANDB_MODE=offline`) so that nothing waits.",
        false_positives="Within a process group it is a rank that died or a wrong MASTER_ADDR.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
        "urllib.error.URLError: <urlopen error [Errno -2] Name or service not known>",
        seen="reproduced on torch 2.13",
        also={
            "gone": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "urllib.error.HTTPError: HTTP Error 404: File not found",
            "requests": 'Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
            "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='api.wandb.ai', port=443): Max retries "
            "exceeded with url: /graphql (Caused by NewConnectionError('<urllib3.connection.HTTPSConnection object "
            "at 0x7f0c>: Failed to establish a new connection: [Errno 101] Network is unreachable'))",
        },
    ),
    Signature(
        id="H1349",
        title="a program that was called took too long",
        family="environment",
        patterns=(r"\bCommand '?[^\n]{1,2000}' timed out after [\d.]+ seconds",),
        exceptions=("TimeoutExpired",),
        means="The script called another program with a time limit, and it was not done by then.",
        fix="Run that command by hand: does it wait for input, for a lock or for the network? Raise the limit only "
        "if it is really slow.",
        example='Traceback (most recent call last):\n  File "train.py", line 41, in <module>\n'
        "subprocess.TimeoutExpired: Command '['sleep', '20']' timed out after 0.3 seconds",
        seen="reproduced on torch 2.13",
    ),
)
