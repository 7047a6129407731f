"""Failures of what samples are made of: batches that cannot be put together, files that cannot be decoded.

Each fails for real; see the package for how they are run. Workers and loader options are in ``loading``.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.failures import failure


@failure("H942", author="F")
def sentences_of_different_lengths() -> None:
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Sentences(Dataset):
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.arange(5 + index % 3)

    for _ in DataLoader(Sentences(), batch_size=4):
        pass


@failure("H942", author="F")
def boxes_in_a_dict_of_a_worker() -> None:
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Detection(Dataset):
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"image": torch.zeros(3, 8, 8), "boxes": torch.zeros(index + 1, 4)}

    for _ in DataLoader(Detection(), batch_size=4, num_workers=2):
        pass


@failure("H942", author="F")
def first_sample_larger_than_the_others_in_a_worker() -> None:
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Audio(Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.zeros(16000 if index == 0 else 400)

    next(iter(DataLoader(Audio(), batch_size=4, num_workers=1)))


@failure("H942", author="F")
def images_not_resized_by_the_own_collate() -> None:
    import torch
    from torch.utils.data import DataLoader

    images = [(torch.zeros(3, 32 + index, 32), index % 2) for index in range(8)]

    def collate(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.stack([image for image, _ in samples]), torch.tensor([label for _, label in samples])

    for images_of_batch, _ in DataLoader(images, batch_size=4, collate_fn=collate):
        print(images_of_batch.shape)


@failure("H942", author="F")
def grey_and_coloured_images_mixed() -> None:
    import numpy as np
    from torch.utils.data import DataLoader

    images = [np.zeros((3 if index != 5 else 1, 16, 16), dtype=np.float32) for index in range(8)]
    for epoch in range(2):
        for batch in DataLoader(images, batch_size=4):
            print(epoch, batch.shape)


@failure("H942", author="F")
def predictions_of_batches_stacked() -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    model = torch.nn.Linear(4, 2)
    predictions = [model(batch) for (batch,) in DataLoader(TensorDataset(torch.zeros(10, 4)), batch_size=4)]
    print(torch.stack(predictions).argmax(-1))


@failure("H943", author="F")
def ragged_lists_of_tokens() -> None:
    from torch.utils.data import DataLoader

    tokens = [[1, 2, 3], [4, 5], [6]]
    for batch in DataLoader(tokens, batch_size=3):
        print(batch)


@failure("H943", author="F")
def ragged_lists_in_dicts_of_a_worker() -> None:
    from torch.utils.data import DataLoader, Dataset

    class Tokenized(Dataset):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> dict[str, object]:
            return {"input_ids": list(range(index + 2)), "label": index % 2}

    for _ in DataLoader(Tokenized(), batch_size=2, num_workers=1):
        pass


@failure("H943", author="F")
def tuples_with_and_without_a_label() -> None:
    import torch
    from torch.utils.data import DataLoader

    samples = [(torch.zeros(4), 1), (torch.zeros(4),), (torch.zeros(4), 0)]
    list(DataLoader(samples, batch_size=3))


@failure("H944", author="F")
def unreadable_image_returned_as_none() -> None:
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Images(Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor | None:
            try:
                Path(f"{index}.jpg").read_bytes()
            except OSError:
                return None
            return torch.zeros(3, 4, 4)

    for _ in DataLoader(Images(), batch_size=2):
        pass


@failure("H944", author="F")
def getitem_without_return_in_a_worker() -> None:
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Pairs(Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> None:
            image = torch.zeros(3, 4, 4)
            label = index % 2
            self.last = image, label

    for image, label in DataLoader(Pairs(), batch_size=2, num_workers=2):
        print(image, label)


@failure("H944", author="F")
def optional_field_is_none() -> None:
    import torch
    from torch.utils.data import DataLoader

    samples = [{"image": torch.zeros(2), "mask": None} for _ in range(4)]
    next(iter(DataLoader(samples, batch_size=4)))


@failure("H1225", author="F", needs="PIL")
def image_without_to_tensor() -> None:
    from PIL import Image
    from torch.utils.data import DataLoader

    samples = [(Image.new("RGB", (8, 8)), index) for index in range(4)]
    for _ in DataLoader(samples, batch_size=2):
        pass


@failure("H1225", author="F")
def date_in_a_sample() -> None:
    import datetime as dt

    import torch
    from torch.utils.data import DataLoader

    day = dt.date(2024, 2, 29)
    samples = [{"value": torch.tensor(1.0), "day": day} for _ in range(4)]
    next(iter(DataLoader(samples, batch_size=2)))


@failure("H1225", author="F")
def own_class_in_a_worker() -> None:
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Sample:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    class Samples(Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Sample:
            return Sample(torch.tensor(index))

    for _ in DataLoader(Samples(), batch_size=2, num_workers=1):
        pass


@failure("H1225", author="F")
def numpy_strings_in_a_sample() -> None:
    import numpy as np
    from torch.utils.data import DataLoader

    rows = np.array([["a", "1.5"], ["b", "2.5"]], dtype=object)
    for batch in DataLoader(list(rows), batch_size=2):
        print(batch)


@failure("H1226", author="F")
def some_samples_lack_a_key() -> None:
    import torch
    from torch.utils.data import DataLoader

    samples = [{"image": torch.zeros(2), "mask": torch.zeros(2)}, {"image": torch.zeros(2)}]
    for _ in DataLoader(samples, batch_size=2):
        pass


@failure("H1226", author="F")
def key_of_augmentation_missing_in_a_worker() -> None:
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Augmented(Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            sample = {"x": torch.zeros(2)}
            if index % 4 != 3:
                sample["flipped"] = torch.tensor(index % 2)
            return sample

    for _ in DataLoader(Augmented(), batch_size=4, num_workers=1):
        pass


@failure("H1227", author="F")
def sparse_rows_in_a_worker() -> None:
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Sparse(Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.eye(4).to_sparse()

    for _ in DataLoader(Sparse(), batch_size=2, num_workers=1):
        pass


@failure("H1228", author="F")
def ragged_labels_to_a_tensor() -> None:
    import torch

    labels = [[0, 1, 1], [1, 0], [1]]
    print(torch.tensor(labels))


@failure("H1228", author="F")
def ragged_tokens_in_a_collate_of_a_worker() -> None:
    import torch
    from torch.utils.data import DataLoader

    def collate(samples: list[list[int]]) -> torch.Tensor:
        return torch.as_tensor(samples)

    tokens = [list(range(size)) for size in (4, 4, 4, 6)]
    for _ in DataLoader(tokens, batch_size=2, num_workers=1, collate_fn=collate):
        pass


@failure("H1228", author="F")
def ragged_rows_to_an_array() -> None:
    import numpy as np
    import torch

    rows = [line.split(",") for line in ("1,2,3", "4,5", "6,7,8")]
    print(torch.from_numpy(np.array(rows, dtype=np.float32)))


@failure("H1228", author="F")
def images_of_different_sizes_in_one_array() -> None:
    import numpy as np

    np.stack([np.asarray([[np.zeros(3), np.zeros(4)]], dtype=np.float32)])


@failure("H1229", author="F")
def table_of_objects_to_a_tensor() -> None:
    import numpy as np
    import torch

    table = np.array([[1, 2.5], [None, 3.0]], dtype=object)
    print(torch.tensor(table))


@failure("H1229", author="F")
def labels_as_strings_to_a_tensor() -> None:
    import numpy as np
    import torch

    labels = np.array(["cat", "dog", "cat"])
    torch.from_numpy(labels)


@failure("H1229", author="F")
def records_to_a_tensor_in_a_dataset() -> None:
    import numpy as np
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Records(Dataset):
        def __init__(self) -> None:
            self.rows = np.zeros(8, dtype=[("x", "f4"), ("y", "f4")])

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.from_numpy(self.rows[index : index + 1])

    for _ in DataLoader(Records(), batch_size=2):
        pass


@failure("H1230", author="F")
def image_flipped_with_numpy() -> None:
    import numpy as np
    import torch

    image = np.zeros((8, 8, 3), dtype=np.float32)
    torch.from_numpy(image[:, ::-1].transpose(2, 0, 1))


@failure("H1230", author="F")
def channels_reversed_in_a_worker() -> None:
    import numpy as np
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Bgr(Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.as_tensor(np.zeros((4, 4, 3), dtype=np.uint8)[..., ::-1])

    for _ in DataLoader(Bgr(), batch_size=2, num_workers=2):
        pass


@failure("H1231", author="F", needs="PIL")
def text_with_the_name_of_an_image() -> None:
    from PIL import Image

    Path("0001.jpg").write_text("<html>404 not found</html>")
    Image.open("0001.jpg").convert("RGB")


@failure("H1231", author="F", needs="PIL")
def image_of_a_half_download_in_a_worker() -> None:
    import numpy as np
    import torch
    from PIL import Image
    from torch.utils.data import DataLoader, Dataset

    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save("whole.png")
    Path("half.png").write_bytes(Path("whole.png").read_bytes()[:4000])

    class Images(Dataset):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> torch.Tensor:
            name = ("whole.png", "half.png")[index]
            return torch.from_numpy(np.array(Image.open(name).convert("RGB")))

    for _ in DataLoader(Images(), num_workers=1):
        pass


@failure("H1231", author="F", needs="PIL")
def jpeg_cut_short() -> None:
    import numpy as np
    from PIL import Image

    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save("whole.jpg")
    Path("half.jpg").write_bytes(Path("whole.jpg").read_bytes()[:1500])
    Image.open("half.jpg").resize((32, 32))


@failure("H1231", author="F", needs="PIL")
def empty_image_file() -> None:
    from PIL import Image
    from torch.utils.data import DataLoader, Dataset

    Path("empty.png").touch()

    class Images(Dataset):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> tuple[int, int]:
            with Path("empty.png").open("rb") as file:
                return Image.open(file).size

    list(DataLoader(Images()))


@failure("H1232", author="F")
def array_of_objects_loaded_plainly() -> None:
    import numpy as np

    np.save("labels.npy", np.array([{"id": 1}, {"id": 2}], dtype=object))
    print(np.load("labels.npy"))


@failure("H1232", author="F")
def array_file_is_text() -> None:
    import numpy as np

    Path("features.npy").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n")
    np.load("features.npy")


@failure("H1232", author="F")
def array_file_cut_short_in_a_dataset() -> None:
    import numpy as np
    import torch
    from torch.utils.data import DataLoader, Dataset

    np.save("x.npy", np.zeros((100, 8), dtype=np.float32))
    Path("x.npy").write_bytes(Path("x.npy").read_bytes()[:1000])

    class Arrays(Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.from_numpy(np.load("x.npy")[index])

    list(DataLoader(Arrays(), num_workers=1))


@failure("H1232", author="F")
def array_file_empty() -> None:
    import numpy as np

    Path("x.npy").touch()
    np.load("x.npy")


@failure("H1232", author="F")
def array_file_mapped_but_cut_short() -> None:
    import numpy as np

    np.save("x.npy", np.zeros(1000))
    Path("x.npy").write_bytes(Path("x.npy").read_bytes()[:2000])
    print(np.load("x.npy", mmap_mode="r").sum())


@failure("H1233", author="F", needs="h5py")
def hdf5_file_is_a_pointer() -> None:
    import h5py

    Path("train.h5").write_text("version https://git-lfs.github.com/spec/v1\n")
    h5py.File("train.h5", "r")


@failure("H1233", author="F", needs="h5py")
def hdf5_cut_short() -> None:
    import h5py
    import numpy as np

    with h5py.File("train.h5", "w") as file:
        file["x"] = np.zeros(10000)
    Path("train.h5").write_bytes(Path("train.h5").read_bytes()[:5000])
    with h5py.File("train.h5", "r") as file:
        print(file["x"][:10])


@failure("H1233", author="F", needs="h5py")
def hdf5_name_missing() -> None:
    import h5py
    import numpy as np

    with h5py.File("train.h5", "w") as file:
        file["x"] = np.zeros(10)
    with h5py.File("train.h5", "r") as file:
        print(file["train/x"][:])


@failure("H1234", author="F")
def wave_file_is_mp3() -> None:
    import wave

    Path("speech.wav").write_bytes(b"ID3\x04\x00\x00\x00\x00\x00\x00" + bytes(100))
    with wave.open("speech.wav") as file:
        print(file.getframerate())


@failure("H1234", author="F", needs="scipy")
def wave_file_read_by_scipy_is_text() -> None:
    from scipy.io import wavfile

    Path("speech.wav").write_text("<!DOCTYPE html><html></html>")
    wavfile.read("speech.wav")


@failure("H1235", author="F")
def latin1_file_read_as_utf8() -> None:
    Path("train.txt").write_bytes("Übung macht den Meister\n".encode("latin-1"))
    for line in Path("train.txt").read_text(encoding="utf-8").splitlines():
        print(line)


@failure("H1235", author="F")
def utf16_file_in_a_streaming_worker() -> None:
    from torch.utils.data import DataLoader, IterableDataset

    Path("lines.csv").write_bytes("a,b\n1,2\n".encode("utf-16"))

    class Lines(IterableDataset):
        def __iter__(self):
            with Path("lines.csv").open(encoding="utf-8") as file:
                yield from file

    for _ in DataLoader(Lines(), num_workers=1):
        pass


@failure("H1236", author="F")
def missing_value_in_a_column() -> None:
    import torch

    text = "1.5,2.5\n3.5,n/a\n"
    rows = [[float(field) for field in line.split(",")] for line in text.splitlines()]
    print(torch.tensor(rows))


@failure("H1236", author="F")
def heading_read_as_numbers() -> None:
    import numpy as np

    Path("x.csv").write_text("height,width\n1,2\n3,4\n")
    np.loadtxt("x.csv", delimiter=",")


@failure("H1236", author="F")
def label_with_a_unit_in_a_dataset() -> None:
    from torch.utils.data import DataLoader, Dataset

    class Rows(Dataset):
        rows = ("12", "17", "9kg", "4")

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, index: int) -> int:
            return int(self.rows[index])

    for _ in DataLoader(Rows(), num_workers=1):
        pass


@failure("H1237", author="F")
def gzip_file_that_is_not_one() -> None:
    import gzip

    Path("train-images-idx3-ubyte.gz").write_text("<html>503</html>")
    with gzip.open("train-images-idx3-ubyte.gz") as file:
        print(len(file.read()))


@failure("H1237", author="F")
def gzip_file_cut_short_in_a_worker() -> None:
    import gzip
    import json

    from torch.utils.data import DataLoader, IterableDataset

    with gzip.open("part.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"id": row, "square": row * row}) + "\n" for row in range(5000))
    Path("part.jsonl.gz").write_bytes(Path("part.jsonl.gz").read_bytes()[:5000])

    class Lines(IterableDataset):
        def __iter__(self):
            with gzip.open("part.jsonl.gz", "rt") as file:
                for line in file:
                    yield json.loads(line)

    for _ in DataLoader(Lines(), num_workers=1, batch_size=64):
        pass


@failure("H1237", author="F")
def zip_of_images_is_a_web_page() -> None:
    import zipfile

    Path("images.zip").write_text("<html>Quota exceeded</html>")
    with zipfile.ZipFile("images.zip") as archive:
        archive.extractall("images")


@failure("H1237", author="F")
def tar_shard_cut_short() -> None:
    import io
    import tarfile

    with tarfile.open("shard-000.tar", "w") as archive:
        for number in range(10):
            entry = tarfile.TarInfo(f"{number}.bin")
            entry.size = 5000
            archive.addfile(entry, io.BytesIO(bytes(5000)))
    Path("shard-000.tar").write_bytes(Path("shard-000.tar").read_bytes()[:20000])
    with tarfile.open("shard-000.tar") as archive:
        for member in archive:
            print(len(archive.extractfile(member).read()))


@failure("H1237", author="F")
def compressed_column_flipped_a_bit() -> None:
    import zlib

    data = bytearray(zlib.compress(bytes(range(256)) * 64))
    data[40] ^= 255
    zlib.decompress(bytes(data))


@failure("H1238", author="F")
def field_of_a_csv_too_long() -> None:
    import csv

    Path("captions.csv").write_text('0,"' + "word " * 40000 + '"\n')
    with Path("captions.csv").open(newline="") as file:
        for row in csv.reader(file):
            print(len(row))


@failure("H1377", author="F")
def json_lines_cut_in_the_middle() -> None:
    import json

    from torch.utils.data import DataLoader, Dataset

    Path("train.jsonl").write_text('{"text": "a", "label": 0}\n{"text": "b", "la')

    class Lines(Dataset):
        def __init__(self) -> None:
            self.lines = Path("train.jsonl").read_text().splitlines()

        def __len__(self) -> int:
            return len(self.lines)

        def __getitem__(self, index: int) -> dict[str, object]:
            return json.loads(self.lines[index])

    for _ in DataLoader(Lines(), num_workers=1):
        pass


@failure("H1239", author="F")
def index_file_is_no_database() -> None:
    import sqlite3

    Path("index.db").write_bytes(b"not a database, but long enough for a header" * 40)
    print(sqlite3.connect("index.db").execute("select count(*) from samples").fetchone())


@failure("H1239", author="F")
def connection_shared_with_a_thread_of_the_loader() -> None:
    import sqlite3
    from concurrent.futures import ThreadPoolExecutor

    connection = sqlite3.connect("index.db")
    connection.execute("create table samples (id integer)")
    with ThreadPoolExecutor(1) as pool:
        print(pool.submit(connection.execute, "select * from samples").result().fetchall())


@failure("H1239", author="F")
def database_locked_by_another_job() -> None:
    import sqlite3

    writer = sqlite3.connect("index.db", isolation_level=None)
    writer.execute("create table samples (id integer)")
    writer.execute("begin exclusive")
    reader = sqlite3.connect("index.db", timeout=0.1)
    print(reader.execute("select * from samples").fetchall())
