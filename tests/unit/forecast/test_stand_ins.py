"""What user code finds of CUDA on the fake device."""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.forecast.in_child import answer, case, results_of
from torch import nn

from holdfast.forecast.fake.device import forecast_device


@case
def queries() -> Any:
    with forecast_device() as device:
        properties = torch.cuda.get_device_properties(0)
        found = {
            "available": torch.cuda.is_available(),
            "count": torch.cuda.device_count(),
            "current": torch.cuda.current_device(),
            "bf16": torch.cuda.is_bf16_supported(),
            "capability": list(torch.cuda.get_device_capability()),
            "same capability": (properties.major, properties.minor) == torch.cuda.get_device_capability(),
            "allocated": torch.cuda.memory_allocated() + torch.cuda.max_memory_reserved("cuda:0"),
            "free": torch.cuda.mem_get_info()[0] == properties.total_memory,
            "capturing": torch.cuda.is_current_stream_capturing(),
            "built": torch.backends.cuda.is_built(),
        }
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.manual_seed_all(0)
        torch.manual_seed(0)
        torch.cuda.set_rng_state(torch.cuda.get_rng_state())
        with torch.cuda.device(0):
            found["inside"] = torch.zeros(1, device="cuda").get_device()
        assumed = sorted(a.what for a in device.assumptions if a.what.startswith("torch.cuda."))
        lines = {a.line.rpartition(" ")[2] for a in device.assumptions}
    found["assumed"] = [what.partition("(")[0] for what in assumed]
    found["lines"] = sorted(lines)
    return found


@case
def the_device_as_seen() -> Any:
    with forecast_device() as device:
        model, x = nn.Linear(2, 2).to("cuda"), torch.zeros(1, 2, device="cuda")
        y = model(x)
        return {
            "type": [x.device.type, y.device.type, model.weight.device.type, torch.zeros(1).device.type],
            "is_cuda": [x.is_cuda, y.is_cuda, model.weight.is_cuda, torch.zeros(1).is_cuda],
            "same": x.device == torch.device("cuda", 0) == next(model.parameters()).device,
            "made there": torch.ones(1, device=x.device).fake_device == device.device,
            "moved there": torch.ones(1).to(x.device).fake_device == device.device,
            "by type": torch.ones(1).to(x).fake_device == device.device,
        }


def _scaled_steps(scaler: Any, autocast: Any) -> dict[str, Any]:
    model = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        with autocast:
            loss = model(torch.zeros(2, 4, device="cuda")).square().mean()
            dtype = str(model(torch.zeros(2, 4, device="cuda")).dtype)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return {
        "enabled": scaler.is_enabled(),
        "dtype": dtype,
        "steps": int(optimizer.state[model.weight]["step"]),
        "scale on": str(scaler._scale.fake_device),
    }


@case
def scaled_steps() -> Any:
    import warnings

    with forecast_device() as device:
        new = _scaled_steps(torch.amp.GradScaler("cuda"), torch.autocast("cuda", dtype=torch.float16))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            old = _scaled_steps(torch.cuda.amp.GradScaler(), torch.cuda.amp.autocast())
        told = [a.what for a in device.assumptions]
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        by_default = str(torch.get_autocast_dtype("cuda"))
        state = [torch.is_autocast_enabled(), torch.is_autocast_enabled("cuda")]
        with device.autocast(), torch.autocast("cuda"):
            state += [
                torch.is_autocast_enabled(),
                torch.is_autocast_enabled("cuda"),
                torch.is_autocast_enabled("cpu"),
            ]
    return [new, old, "no gradient overflowed: GradScaler lets the optimizer step" in told, by_default, state]


@case
def compiled() -> Any:
    with forecast_device() as device:
        model = torch.compile(nn.Linear(2, 2).cuda(), mode="max-autotune")
        model.compile()

        @torch.compile(fullgraph=True)
        def double(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        out = double(model(torch.zeros(1, 2, device="cuda")))
        return [list(out.shape), type(model).__name__, any("torch.compile" in a.what for a in device.assumptions)]


@case
def transformers() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "transformers", "utils")
        package.mkdir(parents=True)
        (package.parent / "__init__.py").touch()
        (package / "__init__.py").touch()
        (package / "import_utils.py").write_text(
            "import torch\ndef is_fake_tensor(x):\n    return isinstance(x, torch._subclasses.FakeTensor)\n"
            "def is_tracing(x):\n    return is_fake_tensor(x)\n"
        )
        (package / "user.py").write_text("from .import_utils import is_fake_tensor, is_tracing\n")
        sys.path.insert(0, folder)
        before = list(sys.meta_path)
        with forecast_device():
            from transformers.utils import user  # type: ignore[import-not-found]

            x = torch.zeros(1)
            answers = [user.is_fake_tensor(x), user.is_tracing(x), len(sys.meta_path) > len(before)]
        return [*answers, sys.meta_path == before]


@case
def saving() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "safetensors")
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "torch.py").write_text("def save_file(tensors, filename):\n    open(filename, 'w').close()\n")
        kept = Path(folder, "best.pt")
        kept.write_bytes(b"of a real run")
        sys.path.insert(0, folder)
        with forecast_device() as device:
            import safetensors.torch  # type: ignore[import-not-found]
            from torch import save

            model = nn.Linear(2, 2).cuda()
            torch.save(model.state_dict(), kept)
            save(obj=model, f=str(kept))
            safetensors.torch.save_file(model.state_dict(), str(kept))
            with device.suspended():
                copy = io.BytesIO()
                torch.save(torch.ones(2), copy)
                copy.seek(0)
                copied = torch.load(copy).tolist()
            said = sorted({a.what for a in device.assumptions if "was left out" in a.what})
        after = Path(folder, "after.pt")
        torch.save(torch.ones(1), after)
        return [kept.read_bytes().decode(), copied, said, after.stat().st_size > 0]


@case
def large_arrays() -> Any:
    with forecast_device() as device:
        x = torch.randn(3, 1000, 1000, device="cuda")
        array, nested = x.cpu().numpy(), torch.ones(2, 3, device="cuda").mul(x[0, 0, 0]).tolist()
        mask = (x > 0).cpu().numpy()
        asked = len(device.assumptions)
        return [array.shape, str(array.dtype), nested, mask.shape, str(mask.dtype), asked]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """What the cases gave."""
    return results_of(__file__)


def test_torch_cuda_answers(results: dict[str, Any]) -> None:
    """Queries are answered as by one idle GPU, and those that memory may depend on are listed with their line."""
    found = results["queries"]
    assert found.pop("assumed") == [
        "torch.cuda.get_device_capability",
        "torch.cuda.get_device_capability",
        "torch.cuda.get_device_properties",
        "torch.cuda.max_memory_reserved",
        "torch.cuda.mem_get_info",
        "torch.cuda.memory_allocated",
    ]
    assert found.pop("lines") == ["queries"]
    assert found == {
        "available": True,
        "count": 1,
        "current": 0,
        "bf16": True,
        "capability": [8, 0],
        "same capability": True,
        "allocated": 0,
        "free": True,
        "capturing": False,
        "built": True,
        "inside": 0,
    }


def test_user_code_sees_a_tensor_on_cuda(results: dict[str, Any]) -> None:
    """``x.device`` and ``x.is_cuda`` say CUDA outside torch, and what is made there comes to the fake device."""
    assert results["the_device_as_seen"] == {
        "type": ["cuda", "cuda", "cuda", "cpu"],
        "is_cuda": [True, True, True, False],
        "same": True,
        "made there": True,
        "moved there": True,
        "by type": True,
    }


def test_grad_scaler_and_autocast_for_cuda(results: dict[str, Any]) -> None:
    """Both spellings of GradScaler and autocast work on the fake device, every step is made, and that is said."""
    new, old, told, by_default, state = results["scaled_steps"]
    expected = {"enabled": True, "dtype": "torch.float16", "steps": 2, "scale on": "forecast:0"}
    assert new == old == expected
    assert told is True
    assert by_default == "torch.bfloat16"
    assert state == [False, False, True, True, False]


def test_compile_is_forecast_as_eager(results: dict[str, Any]) -> None:
    """torch.compile, as a call and as a decorator, gives the eager code and an assumption."""
    assert results["compiled"] == [[1, 2], "Linear", True]


def test_transformers_does_not_notice(results: dict[str, Any]) -> None:
    """Its test for fake tensors says no in every module that is imported meanwhile."""
    assert results["transformers"] == [False, False, True, True], "hooks were put in for it, and all taken out"


def test_nothing_is_saved(results: dict[str, Any]) -> None:
    """What the step writes by torch or safetensors is left out and said; a copy in memory is made."""
    content, copied, said, works_after = results["saving"]
    assert content == "of a real run"
    assert copied == [1.0, 1.0]
    assert said == [
        "safetensors.torch.save_file was left out: nothing was written",
        "torch.save was left out: nothing was written",
    ]
    assert works_after is True


def test_a_large_tensor_is_one_question(results: dict[str, Any]) -> None:
    """All elements of an array whose values are unknown are answered at once, in its shape and type."""
    shape = [3, 1000, 1000]
    *found, asked = results["large_arrays"]
    assert found == [shape, "float32", [[found[2][0][0]] * 3] * 2, shape, "bool"]
    assert asked <= 3


if __name__ == "__main__":
    answer()
