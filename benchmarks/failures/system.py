"""Failures of the machine: full disks, missing files, permissions, native crashes, networks, child programs."""

# ruff: noqa: PTH101, PTH102, PTH103, PTH123, PTH208, SIM115 - programs stand here as users write them

from __future__ import annotations

from benchmarks.failures import failure
from benchmarks.failures.small_disks import small_disk


@failure("H981", author="G")
def disk_full_while_logging() -> None:
    folder = small_disk(megabytes=1)
    with (folder / "train.log").open("w") as log:
        for step in range(200_000):
            log.write(f"step {step} loss {1 / (step + 1):.6f}\n")


@failure("H981", author="G")
def disk_full_while_copying_the_data() -> None:
    import shutil
    from pathlib import Path

    folder = small_disk(megabytes=1)
    Path("data.bin").write_bytes(bytes(3_000_000))
    shutil.copy("data.bin", folder / "data.bin")


@failure("H981", author="G")
def disk_full_while_writing_features() -> None:
    import numpy as np

    folder = small_disk(megabytes=1)
    np.save(folder / "features.npy", np.ones((1000, 1000)))


@failure("H981", author="G", needs="safetensors", also=("H984",))
def disk_full_with_safetensors() -> None:
    import torch
    from safetensors.torch import save_file

    folder = small_disk(megabytes=1)
    save_file({"weight": torch.ones(1000, 1000)}, folder / "model.safetensors")


@failure("H988", author="G")
def configuration_file_missing() -> None:
    import yaml

    with open("configs/base.yaml") as file:
        yaml.safe_load(file)


@failure("H1610", author="G")
def script_that_is_not_there() -> None:
    import os
    import sys

    os.execv(sys.executable, [sys.executable, "train_v2.py"])


@failure("H988", author="G")
def pretrained_weights_missing() -> None:
    import torch

    torch.nn.Linear(1, 1).load_state_dict(torch.load("weights/pretrained.pt"))


@failure("H988", author="G")
def image_listed_but_not_there() -> None:
    import torch
    from PIL import Image
    from torch.utils.data import DataLoader, Dataset

    class Images(Dataset[int]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> int:
            with Image.open(f"images/{index:05}.jpg") as image:
                return image.width

    torch.manual_seed(0)
    for _batch in DataLoader(Images(), batch_size=1, num_workers=1):
        pass


@failure("H988", author="G")
def data_folder_missing() -> None:
    import os

    classes = sorted(os.listdir("/data/imagenet-that-is-not-mounted/train"))
    print(len(classes))


@failure("H988", author="G")
def not_allowed_to_write_the_shared_folder() -> None:
    import os
    from pathlib import Path

    Path("shared").mkdir(mode=0o755)
    os.chmod(".", 0o755)
    os.setuid(65534)
    Path("shared/run1").mkdir()


@failure("H988", author="G")
def not_allowed_to_save() -> None:
    import os

    import torch

    net = torch.nn.Linear(2, 2)
    os.mkdir("checkpoints", 0o755)
    os.chmod(".", 0o755)
    os.setuid(65534)
    with open("checkpoints/last.pt", "wb") as file:
        torch.save(net.state_dict(), file)


@failure("H988", author="G")
def launcher_without_execute_permission() -> None:
    import subprocess
    from pathlib import Path

    Path("preprocess.sh").write_text("#!/bin/sh\necho done\n")
    subprocess.run(["./preprocess.sh"], check=True)


@failure("H988", author="G")
def decoder_program_not_installed() -> None:
    import subprocess

    subprocess.run(["ffmpeg-that-nobody-has", "-i", "a.mp3", "a.wav"], check=True)


@failure("H989", author="G")
def cuda_runtime_library_missing() -> None:
    import ctypes

    ctypes.CDLL("libcudart.so.11.0")


@failure("H989", author="G")
def sound_library_missing() -> None:
    import ctypes

    class Reader:
        library = "libsndfile_missing.so.1"

        def __init__(self) -> None:
            self.handle = ctypes.cdll.LoadLibrary(self.library)

    Reader()


@failure("H1357", author="G")
def text_file_as_shared_library() -> None:
    import ctypes
    from pathlib import Path

    Path("ops.so").write_text("this was a pointer to large file storage, not a library at all\n" * 20)
    ctypes.CDLL("./ops.so")


@failure("H1357", author="G")
def extension_cut_off_while_copying() -> None:
    import importlib.util
    from pathlib import Path

    Path("fast_ops.so").write_bytes(b"\x7fELF")
    spec = importlib.util.spec_from_file_location("fast_ops", "fast_ops.so")
    assert spec is not None
    importlib.util.module_from_spec(spec)


@failure("H1357", author="G")
def custom_operators_of_a_damaged_build() -> None:
    from pathlib import Path

    import torch

    Path("libcustom.so").write_bytes(b"\x7fELF\x02\x01\x01" + bytes(100))
    torch.ops.load_library("libcustom.so")


@failure("H1357", author="G")
def function_that_the_library_does_not_have() -> None:
    import ctypes

    ctypes.CDLL("libm.so.6").fused_softmax_forward(0)


@failure("H991", author="G")
def native_code_reads_a_null_pointer() -> None:
    import ctypes
    import faulthandler

    faulthandler.enable()
    ctypes.string_at(0)


@failure("H991", author="G")
def segmentation_fault_in_a_dataset_read_in_the_main_process() -> None:
    import ctypes
    import faulthandler

    from torch.utils.data import DataLoader, Dataset

    faulthandler.enable()

    class Native(Dataset[bytes]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> bytes:
            return ctypes.string_at(index)

    next(iter(DataLoader(Native())))


@failure("H991", author="G")
def segmentation_fault_seen_by_a_shell() -> None:
    import subprocess
    import sys

    code = "import ctypes; ctypes.memset(0, 1, 64)"
    ended = subprocess.run(["/bin/bash", "-c", f"{sys.executable} -c '{code}'; exit $?"], check=False)
    raise SystemExit(ended.returncode)


@failure("H1605", author="G")
def abort_in_native_code() -> None:
    import faulthandler
    import os

    faulthandler.enable()
    os.abort()


@failure("H1342", author="G")
def memory_freed_twice() -> None:
    import ctypes

    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    block = libc.malloc(1 << 11)
    libc.free(block)
    libc.free(block)


@failure("H1342", author="G")
def pointer_that_was_never_allocated() -> None:
    import ctypes

    libc = ctypes.CDLL(None)
    libc.free.argtypes = [ctypes.c_void_p]
    buffer = ctypes.create_string_buffer(64)
    libc.free(ctypes.addressof(buffer) + 8)


@failure("H1342", author="G")
def exception_of_cpp_in_a_thread_without_handler() -> None:
    import ctypes

    library = ctypes.CDLL("libstdc++.so.6")
    library._ZSt20__throw_length_errorPKc(b"vector::reserve")


@failure("H1614", author="G")
def instruction_that_the_processor_lacks() -> None:
    import ctypes
    import faulthandler
    import mmap

    faulthandler.enable()
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(b"\x0f\x0b\xc3")
    ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()


@failure("H1614", author="G")
def division_by_zero_in_native_code() -> None:
    import faulthandler
    import os
    import signal

    faulthandler.enable()
    os.kill(os.getpid(), signal.SIGFPE)


@failure("H1344", author="G")
def log_longer_than_a_file_may_be() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    with open("metrics.csv", "w") as file:
        for step in range(10_000):
            print(step, 0.5, sep=",", file=file)


@failure("H1344", author="G")
def features_longer_than_a_file_may_be() -> None:
    import resource
    from pathlib import Path

    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    for shard in range(3):
        Path(f"shard{shard}.bin").write_bytes(bytes(50_000 * shard))


@failure("H1345", author="G")
def folder_given_as_checkpoint() -> None:
    from pathlib import Path

    import torch

    Path("run1").mkdir()
    torch.load("run1")


@failure("H1345", author="G")
def file_where_a_folder_should_be() -> None:
    import os
    from pathlib import Path

    Path("logs").touch()
    os.makedirs("logs/run1")


@failure("H1345", author="G")
def folder_of_a_run_exists_already() -> None:
    from pathlib import Path

    for _attempt in range(2):
        Path("runs/baseline").mkdir(parents=True)


@failure("H1345", author="G")
def name_made_of_all_settings() -> None:
    settings = {f"parameter_{number}": number * 0.001 for number in range(30)}
    open("_".join(f"{key}={value}" for key, value in settings.items()) + ".log", "w")


@failure("H1347", author="G")
def output_on_a_read_only_disk() -> None:
    folder = small_disk(megabytes=1, read_only=True)
    (folder / "checkpoints").mkdir()


@failure("H1347", author="G")
def tensorboard_on_a_read_only_disk() -> None:
    from tensorboardX import SummaryWriter

    SummaryWriter(str(small_disk(megabytes=1, read_only=True) / "logs"))


@failure("H1346", author="G")
def input_output_error_of_a_device() -> None:
    with open("/proc/self/mem", "rb") as memory:
        memory.seek(8)
        memory.read(16)


@failure("H1348", author="G")
def download_from_a_host_that_does_not_exist() -> None:
    import torch

    torch.hub.load_state_dict_from_url("https://weights.example.invalid/resnet50.pth", model_dir="cache")


@failure("H1348", author="G")
def tracking_server_not_running() -> None:
    import json
    import urllib.request

    request = urllib.request.Request("http://127.0.0.1:9/api/runs", data=json.dumps({"loss": 0.1}).encode())
    urllib.request.urlopen(request, timeout=2)


@failure("H1348", author="G")
def weights_were_moved() -> None:
    import http.server
    import threading

    import torch

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    torch.hub.download_url_to_file(f"http://127.0.0.1:{server.server_port}/model.pth", "model.pth", progress=False)


@failure("H1348", author="G")
def socket_to_a_host_without_name() -> None:
    import socket

    socket.create_connection(("gpu-node-17.cluster.invalid", 29500), timeout=2)


@failure("H1348", author="G")
def server_that_never_answers() -> None:
    import socket
    import urllib.request

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        urllib.request.urlopen(f"http://127.0.0.1:{listener.getsockname()[1]}/", timeout=0.5)


@failure("H1615", author="G")
def preprocessing_program_fails() -> None:
    import subprocess
    import sys

    subprocess.run([sys.executable, "-c", "raise SystemExit(4)"], check=True)


@failure("H1615", author="G")
def revision_of_a_folder_without_git() -> None:
    import subprocess

    subprocess.check_output(["ls", "no-such-folder"], text=True)


@failure("H1349", author="G")
def evaluation_program_too_slow() -> None:
    import subprocess

    subprocess.run(["sleep", "20"], timeout=0.3, check=True)


@failure("H1237", author="G")
def data_archive_is_a_web_page() -> None:
    import zipfile
    from pathlib import Path

    Path("data.zip").write_text("<html>quota exceeded</html>")
    zipfile.ZipFile("data.zip").extractall()


@failure("H1237", author="G")
def tar_archive_is_a_web_page() -> None:
    import tarfile
    from pathlib import Path

    Path("cifar.tar.gz").write_text("<html>quota exceeded</html>")
    with tarfile.open("cifar.tar.gz", "r:gz") as archive:
        archive.extractall(filter="data")


@failure("H1237", author="G")
def compressed_digits_cut_off() -> None:
    import gzip
    from pathlib import Path

    Path("train-images.gz").write_bytes(gzip.compress(bytes(range(256)) * 1000)[:-40])
    with gzip.open("train-images.gz") as file:
        file.read()


@failure("H1237", author="G")
def compressed_shard_with_flipped_bits() -> None:
    import random
    import zlib

    packed = bytearray(zlib.compress(random.Random(0).randbytes(5000)))
    packed[2000] ^= 0xFF
    zlib.decompress(bytes(packed))


@failure("H1604", author="G")
def interrupted_at_the_keyboard() -> None:
    import os
    import signal
    import time

    signal.signal(signal.SIGINT, signal.default_int_handler)
    for step in range(100):
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)


@failure("H1359", author="G")
def no_compiler_for_a_custom_operator() -> None:
    import os

    from torch.utils.cpp_extension import load_inline

    os.environ["PATH"] = "/nonexistent"
    load_inline("add_one", "at::Tensor add_one(at::Tensor x) { return x + 1; }", functions=["add_one"])


@failure("H1359", author="G")
def custom_operator_with_a_typing_mistake() -> None:
    from pathlib import Path

    from torch.utils.cpp_extension import load

    Path("broken.cpp").write_text("int add_one(int x { return x + 1; }\n")
    load("broken", ["broken.cpp"], build_directory=".")


@failure("H1359", author="G")
def extension_needs_the_cuda_toolkit() -> None:
    from torch.utils.cpp_extension import CUDAExtension

    CUDAExtension("fused", ["fused.cu"])
