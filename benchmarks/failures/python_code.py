"""Failures by plain mistakes in a program: names, arguments, keys, types, as they stand in training scripts."""

# ruff: noqa: ARG001, F507, PTH123, UP031 - programs stand here as users write them

from __future__ import annotations

from benchmarks.failures import failure


@failure("H992", author="G", limit_bytes=2 << 30)
def module_that_calls_itself() -> None:
    import torch

    class Tree(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self(x / 2)

    Tree()(torch.ones(1))


@failure("H992", author="G", limit_bytes=2 << 30)
def attribute_lookup_without_end() -> None:
    class Wrapper:
        def __init__(self, model: object) -> None:
            self.inner = model

        def __getattr__(self, name: str) -> object:
            return getattr(self.model, name)

    Wrapper(object()).train()


@failure("H992", author="G", limit_bytes=2 << 30)
def deep_copy_of_a_long_chain() -> None:
    import copy

    chain: list[object] = []
    for _ in range(20_000):
        chain = [chain]
    copy.deepcopy(chain)


@failure("H992", author="G", limit_bytes=2 << 30)
def dataset_that_retries_its_own_bad_sample() -> None:
    from torch.utils.data import DataLoader, Dataset

    class Retrying(Dataset[int]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            readable = index > 4
            return index if readable else self[(index + 1) % len(self)]

    next(iter(DataLoader(Retrying())))


@failure("H1360", author="G")
def label_that_is_not_in_the_table() -> None:
    from torch.utils.data import DataLoader, Dataset

    class Animals(Dataset[int]):
        numbers = {"cat": 0, "dog": 1}  # noqa: RUF012 - as users write it
        labels = ("cat", "dog", "Dog")

        def __len__(self) -> int:
            return len(self.labels)

        def __getitem__(self, index: int) -> int:
            return self.numbers[self.labels[index]]

    for _batch in DataLoader(Animals(), batch_size=2):
        pass


@failure("H1360", author="G")
def length_that_promises_too_much() -> None:
    from torch.utils.data import DataLoader, Dataset

    class Windows(Dataset[float]):
        def __init__(self) -> None:
            self.values, self.size = [float(i) for i in range(100)], 10

        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> float:
            return self.values[index + self.size]

    sum(len(batch) for batch in DataLoader(Windows(), batch_size=32, num_workers=2))


@failure("H1360", author="G")
def annotation_without_boxes() -> None:
    from torch.utils.data import Dataset

    class Detection(Dataset[list[float]]):
        records = [{"file": "a.jpg", "boxes": [1.0]}, {"file": "b.jpg"}]  # noqa: RUF012 - as users write it

        def __getitem__(self, index: int) -> list[float]:
            return self.records[index]["boxes"]

    dataset = Detection()
    for index in range(2):
        print(dataset[index])


@failure("H1360", author="G")
def column_missing_in_a_row() -> None:
    import csv
    import io

    from torch.utils.data import DataLoader, Dataset

    class Table(Dataset[float]):
        def __init__(self) -> None:
            self.rows = list(csv.DictReader(io.StringIO("id,price\n1,3.5\n")))

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, index: int) -> float:
            return float(self.rows[index]["target"])

    next(iter(DataLoader(Table(), num_workers=1)))


@failure("H1365", author="G")
def forward_without_the_mask() -> None:
    import torch

    class Decoder(torch.nn.Module):
        def forward(self, words: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return words * mask

    Decoder()(torch.ones(2))  # the mask was forgotten


@failure("H1365", author="G")
def keyword_that_the_model_does_not_know() -> None:
    import torch

    class Net(torch.nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(width, width)

    settings = {"width": 3, "dropout": 0.1}
    Net(**settings)


@failure("H1365", author="G")
def self_forgotten_in_a_method() -> None:
    class Trainer:
        def train(epochs: int) -> None:  # noqa: N805 - the mistake
            print(epochs)

    Trainer().train(3)


@failure("H1365", author="G")
def verbose_that_schedulers_lost() -> None:
    import torch

    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, verbose=True)


@failure("H1365", author="G")
def learning_rate_given_twice() -> None:
    def build(model: str, lr: float = 0.1) -> None:
        print(model, lr)

    build("small", 0.1, lr=0.2)


@failure("H1366", author="G")
def layer_spelt_differently() -> None:
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1 = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fcl(x)

    Net()(torch.ones(1, 2))


@failure("H1366", author="G")
def shape_of_a_list() -> None:
    batch = [[1.0, 2.0], [3.0, 4.0]]
    print(batch.shape)


@failure("H1366", author="G")
def attribute_behind_data_parallel() -> None:
    import torch

    class Net(torch.nn.Module):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return x

    torch.nn.DataParallel(Net()).encode(torch.ones(1))


@failure("H1366", author="G")
def output_of_a_model_that_returns_a_tuple() -> None:
    import torch

    torch.nn.LSTM(4, 4)(torch.ones(3, 2, 4)).mean()


@failure("H1366", author="G")
def option_not_declared() -> None:
    import argparse

    arguments = argparse.ArgumentParser().parse_args([])
    print(arguments.learning_rate)


@failure("H1264", author="G", also=("H1367",))
def forward_without_return() -> None:
    import torch

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> None:
            x * 2

    loss = Net()(torch.ones(3))
    loss.backward()


@failure("H1367", author="G")
def image_that_the_reader_could_not_open() -> None:
    def read(path: str) -> dict[str, int] | None:
        return {"width": 3} if path.endswith(".png") else None

    print(read("a.jpg")["width"])


@failure("H1367", author="G")
def scheduler_that_is_optional() -> None:
    scheduler = None
    for _epoch in range(2):
        scheduler.step()


@failure("H1367", author="G")
def pattern_that_did_not_match() -> None:
    import re

    print(int(re.search(r"epoch(\d+)", "best.pt").group(1)))


@failure("H1367", author="G")
def batches_of_a_loader_builder_without_return() -> None:
    def build_loader() -> None:
        list(range(3))

    for batch in build_loader():
        print(batch)


@failure("H1368", author="G")
def loss_used_before_the_loop_ran() -> None:
    def train(batches: list[int]) -> int:
        for batch in batches:
            loss = batch
        return loss

    train([])


@failure("H1368", author="G")
def import_forgotten() -> None:
    print(np.zeros(3))  # noqa: F821 - the mistake


@failure("H1368", author="G")
def variable_misspelt_after_an_epoch() -> None:
    train_loss = 0.0
    for epoch in range(2):
        train_loss += epoch
    print(f"loss {trian_loss}")  # noqa: F821 - the mistake


@failure("H1369", author="G")
def learning_rate_as_text_times_a_number() -> None:
    import yaml

    settings = yaml.safe_load("lr: 1e-4\nbatch_size: 8")
    print(settings["lr"] / settings["batch_size"])


@failure("H1369", author="G")
def text_compared_with_a_number() -> None:
    import os

    os.environ["EPOCHS"] = "5"
    for epoch in range(3):
        if epoch < os.environ["EPOCHS"]:
            print(epoch)


@failure("H1369", author="G")
def module_called_as_a_function() -> None:
    import pprint

    pprint({"epoch": 1})


@failure("H1369", author="G")
def epochs_from_the_command_line_in_range() -> None:
    epochs = "10"
    for epoch in range(epochs):
        print(epoch)


@failure("H1369", author="G")
def property_called_as_a_method() -> None:
    import torch

    print(torch.ones(2).shape())


@failure("H1369", author="G")
def number_iterated_as_a_batch() -> None:
    for loss in 0.5:
        print(loss)


@failure("H1369", author="G")
def tensor_appended_to_a_tuple() -> None:
    sizes = (3, 4)
    sizes[0] = 5


@failure("H1369", author="G")
def dictionary_as_a_key() -> None:
    seen = set()
    seen.add({"lr": 0.1})


@failure("H1370", author="G")
def loader_that_yields_three_things() -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.zeros(4, 2), torch.zeros(4), torch.zeros(4))
    for image, label in DataLoader(data):
        print(image, label)


@failure("H1370", author="G")
def shape_of_a_gray_image() -> None:
    import numpy as np

    height, width, channels = np.zeros((20, 20)).shape
    print(height, width, channels)


@failure("H1370", author="G")
def line_without_a_label() -> None:
    for line in ("good film\t1", "bad film"):
        text, label = line.split("\t")
        print(text, label)


@failure("H1371", author="G")
def key_missing_in_the_configuration() -> None:
    import yaml

    settings = yaml.safe_load("model: {width: 3}")
    print(settings["model"]["depth"])


@failure("H1371", author="G")
def unknown_model_in_a_registry() -> None:
    import torch

    models = {"mlp": torch.nn.Linear}
    models["resnet18"](3, 3)


@failure("H1371", author="G")
def metric_that_was_not_computed() -> None:
    history: dict[str, list[float]] = {"train_loss": []}
    for epoch in range(2):
        history["train_loss"].append(0.1 * epoch)
        history["val_loss"].append(0.2)


@failure("H1371", author="G")
def layer_missing_in_a_module_dict() -> None:
    import torch

    torch.nn.ModuleDict({"encoder": torch.nn.Identity()})["decoder"](torch.ones(1))


@failure("H1372", author="G")
def last_value_of_an_empty_history() -> None:
    losses: list[float] = []
    print(f"final loss {losses[-1]:.3f}")


@failure("H1372", author="G")
def argument_from_the_command_line() -> None:
    import sys

    sys.argv = ["train.py"]
    print(sys.argv[1])


@failure("H1372", author="G")
def layer_after_the_last() -> None:
    import torch

    net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU())
    print(net[2])


@failure("H1372", author="G")
def third_result_of_a_pair() -> None:
    import torch

    result = torch.nn.GRU(2, 2)(torch.ones(3, 1, 2))
    print(result[2])


@failure("H1373", author="G")
def assertion_about_the_image_size() -> None:
    import torch

    class Patches(torch.nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            assert image.shape[-1] % 16 == 0, f"image size {image.shape[-1]} is not divisible by the patch size 16"
            return image

    Patches()(torch.zeros(1, 3, 100, 100))


@failure("H1373", author="G")
def assertion_without_words() -> None:
    images, labels = list(range(10)), list(range(9))
    assert len(images) == len(labels)


@failure("H1282", author="G")
def comparison_by_testing_tools() -> None:
    import torch

    torch.testing.assert_close(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.1]))


@failure("H1236", author="G")
def missing_value_in_a_table() -> None:
    for cell in ("3.5", "n/a"):
        print(float(cell))


@failure("H1236", author="G")
def step_from_a_file_name() -> None:
    from pathlib import Path

    Path("step_final.pt").touch()
    print(max(int(path.stem.split("_")[1]) for path in Path().glob("step_*.pt")))


@failure("H1235", author="G")
def text_in_another_encoding() -> None:
    from pathlib import Path

    Path("corpus.txt").write_bytes("Müller und Söhne".encode("latin-1"))
    print(Path("corpus.txt").read_text(encoding="utf-8"))


@failure("H1235", author="G")
def compressed_file_read_as_text() -> None:
    import gzip
    from pathlib import Path

    Path("train.jsonl").write_bytes(gzip.compress(b'{"text": "a"}'))
    with Path("train.jsonl").open(encoding="utf-8") as file:
        for line in file:
            print(line)


@failure("H1235", author="G")
def log_in_ascii() -> None:
    with open("train.log", "w", encoding="ascii") as file:
        file.write("epoch 1 \u2714 done")


@failure("H1376", author="G")
def forward_nested_in_init() -> None:
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()

            def forward(self, x):
                return x

    Net()(torch.ones(1))


@failure("H1376", author="G")
def list_of_modules_called() -> None:
    import torch

    torch.nn.ModuleList([torch.nn.Linear(2, 2)])(torch.ones(1, 2))


@failure("H1206", author="G")
def dataset_without_items() -> None:
    from torch.utils.data import DataLoader, Dataset

    class Empty(Dataset[int]):
        def __len__(self) -> int:
            return 3

    next(iter(DataLoader(Empty())))


@failure("H1376", author="G")
def abstract_strategy() -> None:
    import abc

    class Strategy(abc.ABC):
        @abc.abstractmethod
        def loss(self) -> float: ...

    class Contrastive(Strategy):
        temperature = 0.1

    Contrastive()


@failure("H1260", author="G")
def parent_of_a_module_not_initialised() -> None:
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            self.layer = torch.nn.Linear(2, 2)

    Net()


@failure("H1260", author="G")
def parent_not_initialised_with_a_parameter() -> None:
    import torch

    class Scale(torch.nn.Module):
        def __init__(self) -> None:
            self.weight = torch.nn.Parameter(torch.ones(1))

    Scale()


@failure("H1259", author="G")
def tensor_in_place_of_a_parameter() -> None:
    import torch

    layer = torch.nn.Linear(2, 2)
    layer.weight = torch.zeros(2, 2)


@failure("H1382", author="G")
def function_inside_sequential() -> None:
    import torch

    torch.nn.Sequential(torch.nn.Linear(2, 2), torch.relu)


@failure("H1386", author="G")
def numpy_batch_into_a_layer() -> None:
    import numpy as np
    import torch

    torch.nn.Linear(3, 1)(np.zeros((2, 3), dtype=np.float32))


@failure("H1386", author="G")
def list_of_tensors_into_a_loss() -> None:
    import torch

    torch.nn.functional.relu([torch.ones(2), torch.ones(2)])


@failure("H1386", author="G")
def output_tuple_into_the_next_layer() -> None:
    import torch

    torch.nn.Sequential(torch.nn.LSTM(4, 8), torch.nn.Linear(8, 2))(torch.ones(3, 1, 4))


@failure("H1386", author="G")
def size_given_as_a_float() -> None:
    import torch

    torch.zeros(16 / 2, 3)


@failure("H1386", author="G")
def layer_width_as_text() -> None:
    import torch

    torch.nn.Linear("64", 10)


@failure("H1386", author="G")
def dictionary_to_a_device() -> None:
    import torch

    torch.cat({"a": torch.ones(2)})


@failure("H946", author="G")
def more_batches_than_there_are() -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    batches = iter(DataLoader(TensorDataset(torch.zeros(6)), batch_size=2))
    for _step in range(10):
        next(batches)


@failure("H1220", author="G", also=("H946",))
def next_inside_a_generator() -> None:
    from collections.abc import Iterator

    def pairs() -> Iterator[tuple[int, int]]:
        source = iter(range(5))
        while True:
            yield next(source), next(source)

    list(pairs())


@failure("H1388", author="G")
def dictionary_pruned_while_iterating() -> None:
    import torch

    state = dict(torch.nn.Linear(2, 2).state_dict())
    for key in state:
        if key.endswith("weight"):
            del state[key]


@failure("H1395", author="G")
def losses_of_all_heads_in_one_format() -> None:
    import torch

    losses = torch.rand(3)
    for epoch in range(2):
        print(f"epoch {epoch} loss {losses:.4f}")


@failure("H1395", author="G")
def best_score_before_the_first_validation() -> None:
    best = None
    for step in range(100):
        if step % 10 == 0:
            print(f"step {step} best {best:.3f}")


@failure("H1395", author="G")
def log_line_with_a_place_too_many() -> None:
    for epoch in range(3):
        print("epoch %d of %d, loss %.3f" % (epoch, 3))


@failure("H1396", author="G")
def class_of_the_test_set_that_was_never_seen() -> None:
    classes = ["cat", "dog"]
    for label in ("dog", "fox"):
        print(classes.index(label))


@failure("H1396", author="G", needs="sklearn")
def encoder_fitted_on_another_split() -> None:
    from sklearn.preprocessing import LabelEncoder

    LabelEncoder().fit(["cat", "dog"]).transform(["dog", "fox"])
