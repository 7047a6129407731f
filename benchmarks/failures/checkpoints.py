"""Failures by checkpoints: another model, damaged and half-written files, things that cannot be saved or loaded."""

from __future__ import annotations

from benchmarks.failures import failure


@failure("H977", author="G")
def fine_tuning_with_another_number_of_classes() -> None:
    import torch

    pretrained = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1000))
    torch.save(pretrained.state_dict(), "pretrained.pt")
    torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 10)).load_state_dict(torch.load("pretrained.pt"))


@failure("H977", author="G")
def vocabulary_grew_since_the_checkpoint() -> None:
    import torch

    class Language(torch.nn.Module):
        def __init__(self, words: int) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(words, 4)
            self.head = torch.nn.Linear(4, words, bias=False)

    Language(120).load_state_dict(Language(100).state_dict(), strict=False)


@failure("H977", author="G")
def buffer_of_another_length() -> None:
    import torch

    class Rotary(torch.nn.Module):
        def __init__(self, length: int) -> None:
            super().__init__()
            self.register_buffer("angles", torch.arange(length).float())

    Rotary(2048).load_state_dict(Rotary(512).state_dict())


@failure("H978", author="G")
def weights_saved_from_data_parallel() -> None:
    import torch

    net = torch.nn.Sequential(torch.nn.Linear(2, 2))
    torch.save(torch.nn.DataParallel(net).state_dict(), "net.pt")
    net.load_state_dict(torch.load("net.pt", map_location="cpu"))


@failure("H978", author="G")
def weights_saved_from_a_compiled_model() -> None:
    import torch

    net = torch.nn.Linear(2, 2)
    compiled = torch.compile(net)
    net.load_state_dict(compiled.state_dict())


@failure("H978", author="G")
def layer_renamed_in_the_code() -> None:
    import torch

    class Old(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(2, 2)

    class New(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(2, 2)

    New().load_state_dict(Old().state_dict())


@failure("H978", author="G")
def whole_checkpoint_given_as_weights() -> None:
    import torch

    net = torch.nn.Linear(2, 2)
    torch.save({"state_dict": net.state_dict(), "epoch": 3}, "last.ckpt")
    net.load_state_dict(torch.load("last.ckpt"))


@failure("H978", author="G")
def moving_average_model_has_more_keys() -> None:
    import torch

    net = torch.nn.Linear(2, 2)
    average = torch.optim.swa_utils.AveragedModel(net)
    net.load_state_dict(average.state_dict())


@failure("H979", author="G")
def checkpoint_cut_by_a_kill() -> None:
    from pathlib import Path

    import torch

    torch.save({"model": torch.nn.Linear(200, 200).state_dict()}, "last.pt")
    whole = Path("last.pt").read_bytes()
    Path("last.pt").write_bytes(whole[: len(whole) * 2 // 3])
    torch.load("last.pt")


@failure("H979", author="G")
def empty_checkpoint_file() -> None:
    from pathlib import Path

    import torch

    Path("last.pt").touch()
    torch.load("last.pt", weights_only=False)


@failure("H979", author="G")
def empty_checkpoint_with_weights_only() -> None:
    from pathlib import Path

    import torch

    Path("model_0001.pth").write_bytes(b"")
    state = torch.load("model_0001.pth", map_location="cpu", weights_only=True)
    torch.nn.Linear(1, 1).load_state_dict(state)


@failure("H979", author="G")
def scripted_model_cut_in_half() -> None:
    from pathlib import Path

    import torch

    torch.jit.script(torch.nn.Linear(50, 50)).save("net.ts")
    whole = Path("net.ts").read_bytes()
    Path("net.ts").write_bytes(whole[: len(whole) // 2])
    torch.jit.load("net.ts")


@failure("H979", author="G")
def killed_while_saving_then_resumed() -> None:
    import os
    import signal
    import time
    from pathlib import Path

    import torch

    path = Path("last.pt")
    child = os.fork()
    if child == 0:
        torch.save(torch.zeros(150_000_000, dtype=torch.uint8), path)
        os._exit(0)
    while not path.exists() or path.stat().st_size < 1_000_000:
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    torch.load(path)


@failure("H980", author="G")
def file_size_limit_while_saving() -> None:
    import resource

    import torch

    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    torch.save({"weight": torch.zeros(1_000_000)}, "last.pt")


@failure("H980", author="G", also=("H981",))
def disk_full_while_saving_the_model() -> None:
    import torch

    from benchmarks.failures.small_disks import small_disk

    folder = small_disk(megabytes=4)
    net = torch.nn.Linear(2000, 2000)
    for epoch in range(3):
        torch.save(net.state_dict(), folder / f"epoch{epoch}.pt")


@failure("H980", author="G", also=("H981",))
def disk_full_while_saving_optimizer_state() -> None:
    import torch

    from benchmarks.failures.small_disks import small_disk

    folder = small_disk(megabytes=3)
    net = torch.nn.Linear(300, 300)
    optimizer = torch.optim.Adam(net.parameters())
    for step in range(100):
        net(torch.ones(1, 300)).sum().backward()
        optimizer.step()
        with (folder / f"step{step}.pt").open("wb") as file:
            torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, file)


@failure("H982", author="G")
def namespace_in_a_checkpoint() -> None:
    import argparse

    import torch

    torch.save({"args": argparse.Namespace(lr=0.1), "epoch": 3}, "last.pt")
    torch.load("last.pt")


@failure("H982", author="G")
def numpy_scalar_as_best_metric() -> None:
    import numpy as np
    import torch

    torch.save({"best": np.float64(0.93), "model": torch.nn.Linear(1, 1).state_dict()}, "best.pt")
    torch.load("best.pt", map_location="cpu")


@failure("H982", author="G")
def whole_model_saved() -> None:
    import torch

    torch.save(torch.nn.Sequential(torch.nn.Linear(2, 2)), "model.pt")
    torch.load("model.pt")


@failure("H982", author="G")
def page_of_an_expired_link_saved_as_checkpoint() -> None:
    from pathlib import Path

    import torch

    Path("resnet.pth").write_text("<!DOCTYPE html><html><head><title>Sign in</title></head></html>")
    torch.load("resnet.pth")


@failure("H982", author="G")
def pointer_file_of_large_file_storage() -> None:
    from pathlib import Path

    import torch

    Path("weights.pt").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 102400000\n", encoding="ascii"
    )
    torch.load("weights.pt", weights_only=True)


@failure("H982", author="G")
def generator_state_of_numpy() -> None:
    import numpy as np
    import torch

    torch.save({"numpy": np.random.get_state()}, "random.pt")
    torch.load("random.pt")


@failure("H983", author="G")
def file_of_zeros_after_a_power_cut() -> None:
    from pathlib import Path

    import torch

    Path("last.pt").write_bytes(bytes(10_000))
    torch.load("last.pt")


@failure("H984", author="G", needs="safetensors")
def safetensors_cut_off() -> None:
    from pathlib import Path

    import torch
    from safetensors.torch import load_file, save_file

    save_file({"weight": torch.zeros(100, 100)}, "model.safetensors")
    Path("model.safetensors").write_bytes(Path("model.safetensors").read_bytes()[:20_000])
    load_file("model.safetensors")


@failure("H984", author="G", needs="safetensors")
def torch_file_named_safetensors() -> None:
    import torch
    from safetensors import safe_open

    torch.save({"weight": torch.zeros(3)}, "model.safetensors")
    with safe_open("model.safetensors", framework="pt") as file:
        print(list(file.keys()))


@failure("H984", author="G", needs="safetensors")
def empty_safetensors() -> None:
    from pathlib import Path

    from safetensors.torch import load_model
    from torch import nn

    Path("model.safetensors").touch()
    load_model(nn.Linear(1, 1), "model.safetensors")


def _saved_with_a_module_that_is_gone(path: str) -> None:
    """Save a model whose class lives in a module, and take the module away."""
    import sys
    from pathlib import Path

    import torch

    Path("models").mkdir()
    Path("models/__init__.py").touch()
    Path("models/net.py").write_text("import torch\n\nclass Net(torch.nn.Linear):\n    pass\n")
    sys.path.insert(0, str(Path.cwd()))
    import models.net

    torch.save(models.net.Net(2, 2), path)
    for name in ("models.net", "models"):
        del sys.modules[name]
    Path("models").rename("architectures")


@failure("H985", author="G")
def whole_model_after_the_code_moved() -> None:
    import torch

    _saved_with_a_module_that_is_gone("model.pt")
    torch.load("model.pt", weights_only=False)


@failure("H985", author="G", also=("H1361",))
def pickled_vocabulary_of_a_package_that_is_gone() -> None:
    import pickle
    import sys
    from pathlib import Path

    Path("text_tools.py").write_text("class Vocabulary(dict):\n    pass\n")
    sys.path.insert(0, str(Path.cwd()))
    import text_tools

    Path("vocabulary.pkl").write_bytes(pickle.dumps(text_tools.Vocabulary(a=1)))
    del sys.modules["text_tools"]
    Path("text_tools.py").rename("words.py")
    with Path("vocabulary.pkl").open("rb") as file:
        pickle.load(file)


@failure("H1330", author="G")
def checkpoint_without_the_expected_key() -> None:
    import torch

    net = torch.nn.Linear(2, 2)
    torch.save({"state_dict": net.state_dict()}, "last.pt")
    net.load_state_dict(torch.load("last.pt")["model_state_dict"])


@failure("H1330", author="G")
def weights_only_file_used_to_resume() -> None:
    import torch

    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(net.parameters())
    torch.save(net.state_dict(), "best.pt")
    checkpoint = torch.load("best.pt")
    optimizer.load_state_dict(checkpoint["optimizer"])


@failure("H1331", author="G")
def path_instead_of_state() -> None:
    import torch

    torch.nn.Linear(2, 2).load_state_dict("best.pt")


@failure("H1331", author="G")
def model_instead_of_state() -> None:
    import torch

    torch.nn.Linear(2, 2).load_state_dict(torch.nn.Linear(2, 2))


@failure("H1332", author="G")
def lock_inside_a_checkpoint() -> None:
    import threading

    import torch

    torch.save({"queue": threading.Lock(), "epoch": 1}, "last.pt")


@failure("H1332", author="G")
def schedule_with_a_lambda_saved_whole() -> None:
    import torch

    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.95**epoch)
    torch.save({"schedule": schedule}, "last.pt")


@failure("H1332", author="G")
def local_class_saved_whole() -> None:
    import torch

    class Net(torch.nn.Module):
        pass

    torch.save(Net(), "net.pt")


@failure("H1333", author="G")
def folder_for_checkpoints_not_made() -> None:
    import torch

    torch.save(torch.nn.Linear(1, 1).state_dict(), "checkpoints/run1/last.pt")


@failure("H1334", author="G")
def class_from_the_notebook_that_is_gone() -> None:
    import sys

    import torch

    main = sys.modules["__main__"]
    net = type("Net", (torch.nn.Linear,), {"__module__": "__main__"})
    main.Net = net
    torch.save(net(2, 2), "net.pt")
    del main.Net
    torch.load("net.pt", weights_only=False)


@failure("H1335", author="G")
def web_page_as_checkpoint_the_old_way() -> None:
    from pathlib import Path

    import torch

    Path("model.pth").write_text("<html>404: Not Found</html>")
    torch.load("model.pth", weights_only=False)


@failure("H1335", author="G")
def pickled_features_cut_off() -> None:
    import pickle
    from pathlib import Path

    Path("features.pkl").write_bytes(pickle.dumps(list(range(10_000)))[:5000])
    with Path("features.pkl").open("rb") as file:
        pickle.load(file)


@failure("H1335", author="G")
def empty_cache_of_pickles() -> None:
    import pickle
    from pathlib import Path

    Path("cache.pkl").touch()
    pickle.loads(Path("cache.pkl").read_bytes())


@failure("H1336", author="G", needs="safetensors")
def tied_weights_in_safetensors() -> None:
    import torch
    from safetensors.torch import save_file

    embed, head = torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10, bias=False)
    head.weight = embed.weight
    save_file({"embed.weight": embed.weight, "head.weight": head.weight}, "model.safetensors")


@failure("H1336", author="G", needs="safetensors")
def transposed_weight_in_safetensors() -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"weight": torch.randn(4, 6).t()}, "model.safetensors")


@failure("H1336", author="G", needs="safetensors")
def epoch_number_in_safetensors() -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(2), "epoch": 7}, "model.safetensors")


@failure("H1337", author="G")
def distributed_checkpoint_with_another_key() -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    dcp.save({"net.weight": torch.zeros(4)}, checkpoint_id="step10", no_dist=True)
    dcp.load({"model.weight": torch.zeros(4)}, checkpoint_id="step10", no_dist=True)


@failure("H1337", author="G")
def distributed_checkpoint_of_another_size() -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    dcp.save({"weight": torch.zeros(4)}, checkpoint_id="step10", no_dist=True)
    dcp.load({"weight": torch.zeros(8)}, checkpoint_id="step10", no_dist=True)


@failure("H1337", author="G")
def distributed_checkpoint_that_was_not_finished() -> None:
    from pathlib import Path

    import torch
    import torch.distributed.checkpoint as dcp

    dcp.save({"weight": torch.zeros(4)}, checkpoint_id="step10", no_dist=True)
    Path("step10/.metadata").unlink()
    dcp.load({"weight": torch.zeros(4)}, checkpoint_id="step10", no_dist=True)


@failure("H1233", author="G", needs="h5py")
def features_in_hdf5_cut_off() -> None:
    from pathlib import Path

    import h5py
    import numpy as np

    with h5py.File("features.h5", "w") as file:
        file["x"] = np.zeros((500, 50))
    Path("features.h5").write_bytes(Path("features.h5").read_bytes()[:50_000])
    h5py.File("features.h5", "r")


@failure("H1233", author="G", needs="h5py")
def text_file_opened_as_hdf5() -> None:
    from pathlib import Path

    import h5py

    Path("data.hdf5").write_text("id,label\n1,cat\n")
    h5py.File("data.hdf5", "r")


@failure("H1233", author="G", needs="h5py")
def data_set_missing_in_hdf5() -> None:
    import h5py

    with h5py.File("data.hdf5", "w") as file:
        file["images"] = [1, 2, 3]
    with h5py.File("data.hdf5") as file:
        print(file["labels"][:])


@failure("H1232", author="G")
def numpy_file_with_objects() -> None:
    import numpy as np

    np.save("labels.npy", np.array([{"cat": 1}, None], dtype=object))
    np.load("labels.npy")


@failure("H1232", author="G")
def numpy_file_cut_off() -> None:
    from pathlib import Path

    import numpy as np

    np.save("features.npy", np.zeros(1000))
    Path("features.npy").write_bytes(Path("features.npy").read_bytes()[:4001])
    np.load("features.npy")


@failure("H1339", author="G")
def numpy_archive_without_the_array() -> None:
    import numpy as np

    np.savez("split.npz", train=np.zeros(3))
    print(np.load("split.npz")["test"])


@failure("H1232", author="G")
def numpy_archive_cut_off() -> None:
    from pathlib import Path

    import numpy as np

    np.savez("split.npz", train=np.zeros(3000))
    Path("split.npz").write_bytes(Path("split.npz").read_bytes()[:1000])
    np.load("split.npz")["train"]


@failure("H1340", author="G")
def weights_opened_as_scripted_model() -> None:
    import torch

    torch.save(torch.nn.Linear(2, 2).state_dict(), "model.pt")
    torch.jit.load("model.pt")


@failure("H1340", author="G")
def scripted_model_opened_as_weights() -> None:
    import torch

    torch.jit.script(torch.nn.Linear(2, 2)).save("model.pt")
    torch.load("model.pt")
