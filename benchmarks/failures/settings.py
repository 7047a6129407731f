"""Failures before the first step: packages, syntax, command lines, configuration files, environments."""

# ruff: noqa: ARG001, PTH123, UP035 - programs stand here as users write them

from __future__ import annotations

from typing import NoReturn

from benchmarks.failures import failure


def _run_script(text: str, *arguments: str) -> NoReturn:
    """Become ``python train.py`` with this text."""
    import os
    import sys
    from pathlib import Path

    Path("train.py").write_text(text)
    os.execv(sys.executable, [sys.executable, "train.py", *arguments])


@failure("H1361", author="G")
def package_not_installed() -> None:
    import apex_that_nobody_has

    apex_that_nobody_has.amp.initialize()


@failure("H1361", author="G")
def own_package_not_on_the_path() -> None:
    _run_script("from src.models import build_model\n\nbuild_model()\n")


@failure("H1361", author="G")
def model_named_in_the_configuration() -> None:
    import importlib

    importlib.import_module("torch.nn.transformers_zoo")


@failure("H1361", author="G")
def module_to_run_does_not_exist() -> None:
    import os
    import sys

    os.execv(sys.executable, [sys.executable, "-m", "trainer_of_nobody.main"])


@failure("H1362", author="G")
def name_moved_in_a_library() -> None:
    from collections import Mapping

    print(Mapping)


@failure("H1362", author="G")
def class_removed_from_the_library() -> None:
    from torch.optim import AdamWScheduleFree

    print(AdamWScheduleFree)


@failure("H1362", author="G")
def circular_imports_of_the_project() -> None:
    from pathlib import Path

    Path("model.py").write_text("from data import SIZE\n\nclass Model:\n    size = SIZE\n")
    Path("data.py").write_text("from model import Model\n\nSIZE = 3\n")
    _run_script("import model\n")


@failure("H1362", author="G")
def own_file_shadows_a_library() -> None:
    from pathlib import Path

    Path("yaml.py").write_text("# my notes\n")
    _run_script("from yaml import safe_load\n\nsafe_load('a: 1')\n")


@failure("H1363", author="G")
def numpy_alias_that_was_removed() -> None:
    import numpy as np

    np.zeros(3, dtype=np.float)


@failure("H1363", author="G")
def torch_function_that_was_removed() -> None:
    import torch

    torch.symeig(torch.eye(3), eigenvectors=True)


@failure("H1363", author="G")
def scaler_from_a_wrong_module() -> None:
    import torch

    torch.cuda.amp.autocast_mode.GradientScaler()


@failure("H1363", author="G")
def numpy_infinity_of_version_one() -> None:
    import numpy as np

    best = np.Inf
    print(best)


@failure("H1364", author="G")
def missing_bracket() -> None:
    _run_script("import math\n\nvalue = max(1, 2\nprint(value)\n")


@failure("H1364", author="G")
def indentation_lost_in_a_paste() -> None:
    _run_script("for epoch in range(3):\nprint(epoch)\n")


@failure("H1364", author="G")
def tabs_and_spaces() -> None:
    _run_script("def train():\n        epoch = 1\n\tprint(epoch)\n\ntrain()\n")


@failure("H1364", author="G")
def merge_conflict_left_in_a_module() -> None:
    from pathlib import Path

    Path("model.py").write_text("width = 3\n<<<<<<< HEAD\ndepth = 2\n=======\ndepth = 4\n>>>>>>> main\n")
    _run_script("import model\n")


@failure("H1364", author="G")
def print_of_python_two() -> None:
    _run_script("import sys\nprint 'training', sys.argv\n")


@failure("H1364", author="G")
def return_outside_of_a_function() -> None:
    _run_script("import sys\nif len(sys.argv) < 2:\n    return\n")


@failure("H1377", author="G")
def settings_in_json_with_a_comma_too_many() -> None:
    import json
    from pathlib import Path

    Path("ds_config.json").write_text('{"train_batch_size": 8, "fp16": {"enabled": true},}')
    json.loads(Path("ds_config.json").read_text())


@failure("H1377", author="G")
def annotations_cut_off() -> None:
    import json
    from pathlib import Path

    Path("train.json").write_text('{"images": [{"id": 1, "file": "a.jpg"}, {"id": 2, "fi')
    with Path("train.json").open() as file:
        json.load(file)


@failure("H1377", author="G")
def empty_state_file() -> None:
    import json
    from pathlib import Path

    Path("trainer_state.json").touch()
    print(json.loads(Path("trainer_state.json").read_text())["step"])


@failure("H1378", author="G")
def yaml_with_tabs() -> None:
    import yaml

    yaml.safe_load("model:\n\twidth: 3\n")


@failure("H1378", author="G")
def yaml_with_a_colon_in_a_value() -> None:
    import yaml

    yaml.safe_load("name: run: first\nlr: 0.1\n")


@failure("H1378", author="G")
def toml_without_quotes() -> None:
    import tomllib

    tomllib.loads("[model]\nname = resnet\n")


@failure("H1378", author="G")
def ini_without_sections() -> None:
    import configparser

    parser = configparser.ConfigParser()
    parser.read_string("lr = 0.1\n")


@failure("H1378", author="G")
def ini_without_the_option() -> None:
    import configparser

    parser = configparser.ConfigParser()
    parser.read_string("[train]\nlr = 0.1\n")
    print(parser.get("train", "epochs"))


@failure("H1378", author="G")
def yaml_that_makes_objects() -> None:
    import yaml

    yaml.safe_load("optimizer: !!python/object:torch.optim.Adam {}\n")


@failure("H1379", author="G", needs="pydantic")
def settings_of_a_wrong_type() -> None:
    import pydantic

    class Settings(pydantic.BaseModel):
        lr: float
        epochs: int

    Settings.model_validate({"lr": "fast", "epochs": 2.5})


@failure("H1379", author="G", needs="pydantic")
def settings_with_an_unknown_name() -> None:
    import pydantic

    class Settings(pydantic.BaseModel, extra="forbid"):
        lr: float = 0.1

    Settings.model_validate({"learning_rate": 0.1})


@failure("H1380", author="G")
def required_option_missing() -> None:
    _run_script(
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--data', required=True)\n"
        "parser.parse_args()\n"
    )


@failure("H1380", author="G")
def option_misspelt() -> None:
    import argparse

    parser = argparse.ArgumentParser(prog="train.py")
    parser.add_argument("--epochs", type=int, default=10)
    parser.parse_args(["--epoch-count", "3"])


@failure("H1380", author="G")
def choice_that_does_not_exist() -> None:
    import argparse

    parser = argparse.ArgumentParser(prog="main.py")
    parser.add_argument("--model", choices=["small", "large"])
    parser.parse_args(["--model", "huge"])


@failure("H1380", author="G")
def epochs_as_a_fraction() -> None:
    import argparse

    parser = argparse.ArgumentParser(prog="finetune.py")
    parser.add_argument("--epochs", type=int)
    parser.parse_args(["--epochs", "1.5"])


@failure("H1380", author="G", needs="click")
def click_option_misspelt() -> None:
    import click

    @click.command()
    @click.option("--lr", type=float)
    def train(lr: float) -> None:
        print(lr)

    train(["--learning-rate", "0.1"])


@failure("H1380", author="G", needs="click")
def click_option_missing() -> None:
    import click

    @click.command()
    @click.option("--data", required=True, type=click.Path(exists=True))
    def train(data: str) -> None:
        print(data)

    train([])


@failure("H1381", author="G")
def secret_not_set() -> None:
    import os

    os.environ.pop("WANDB_API_KEY", None)
    print(len(os.environ["WANDB_API_KEY"]))


@failure("H1381", author="G")
def data_root_not_set() -> None:
    _run_script("import os\nfrom pathlib import Path\n\nROOT = Path(os.environ['DATA_ROOT'])\n")


@failure("H1267", author="G", timeout=120)
def graph_break_where_none_is_allowed() -> None:
    import torch

    @torch.compile(fullgraph=True, backend="eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            print("positive")
            return x + 1
        return x

    step(torch.ones(3))


@failure("H1384", author="G", timeout=120)
def backend_that_does_not_exist() -> None:
    import torch

    torch.compile(torch.nn.Linear(2, 2), backend="tensorrt_of_nobody")(torch.ones(1, 2))


@failure("H1268", author="G", timeout=120)
def no_compiler_for_inductor() -> None:
    import os

    import torch

    os.environ["PATH"], os.environ["CXX"] = "/nonexistent", "compiler-that-nobody-has"
    torch._inductor.config.cpp.cxx = (None, "compiler-that-nobody-has")
    torch.compile(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))(torch.ones(1, 2))


@failure("H1384", author="G", timeout=120)
def exporting_a_branch_on_data() -> None:
    import torch

    class Gate(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.mean() > 0 else x

    torch.export.export(Gate(), (torch.ones(3),))


@failure("H1385", author="G")
def scripting_a_python_feature() -> None:
    import torch

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with open("trace.txt") as file:
                return x + len(file.read())

    torch.jit.script(Net())


@failure("H1385", author="G")
def scripting_a_wrong_return_type() -> None:
    import torch

    @torch.jit.script
    def count(x: torch.Tensor) -> int:
        return "many"

    count(torch.ones(1))


@failure("H1385", author="G")
def tracing_another_output() -> None:
    import torch

    class Odd(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, object]:
            return {"logits": x, "name": "odd"}

    torch.jit.trace(Odd(), torch.ones(2))


@failure("H1391", author="G")
def metrics_with_a_tensor_written_as_json() -> None:
    import json
    from pathlib import Path

    import torch

    record = {"epoch": 3, "loss": torch.nn.functional.mse_loss(torch.ones(2), torch.zeros(2))}
    Path("metrics.json").write_text(json.dumps(record))


@failure("H1391", author="G")
def settings_with_a_numpy_number_written_as_json() -> None:
    import json

    import numpy as np

    with open("settings.json", "w") as file:
        json.dump({"mean": np.zeros(3).mean(dtype=np.float32), "std": np.float32(1)}, file)


@failure("H1392", author="G")
def unknown_way_to_initialise() -> None:
    import torch

    layer = torch.nn.Linear(4, 4)
    torch.nn.init.kaiming_uniform_(layer.weight, nonlinearity="swish")


@failure("H1392", author="G")
def padding_mode_misspelt() -> None:
    import torch

    torch.nn.Conv2d(3, 4, 3, padding_mode="zero")
