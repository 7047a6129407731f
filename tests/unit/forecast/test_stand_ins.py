"""What user code finds of CUDA on the fake device."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.forecast.fake.device import forecast_device

RUNS_IN_CHILD = True


def test_torch_cuda_answers() -> None:
    """Queries are answered as by one idle GPU, and those that memory may depend on are listed
    with their line.
    """
    with forecast_device() as device:
        properties = torch.cuda.get_device_properties(0)
        assert torch.cuda.is_available()
        assert torch.cuda.is_bf16_supported()
        assert (torch.cuda.device_count(), torch.cuda.current_device()) == (1, 0)
        assert torch.cuda.get_device_capability() == (properties.major, properties.minor) == (8, 0)
        assert torch.cuda.memory_allocated() + torch.cuda.max_memory_reserved("cuda:0") == 0
        assert torch.cuda.mem_get_info()[0] == properties.total_memory
        assert not torch.cuda.is_current_stream_capturing()
        torch.cuda.synchronize()
        torch.manual_seed(0)
        torch.cuda.set_rng_state(torch.cuda.get_rng_state())
        assert {
            one.what.partition("(")[0].removeprefix("torch.cuda.") for one in device.assumptions
        } == {
            *("get_device_capability", "get_device_properties", "max_memory_reserved"),
            *("mem_get_info", "memory_allocated"),
        }
        assert {one.line.rpartition(" ")[2] for one in device.assumptions} == {
            "test_torch_cuda_answers"
        }


def test_user_code_sees_a_tensor_on_cuda() -> None:
    """``x.device`` and ``x.is_cuda`` say CUDA outside torch, and what is made there comes to the
    fake device.
    """
    with forecast_device() as device:
        model, x = nn.Linear(2, 2).to("cuda"), torch.zeros(1, 2, device="cuda")
        for tensor in (x, model(x), model.weight):
            assert tensor.device == torch.device("cuda", 0)
            assert tensor.is_cuda
        assert torch.zeros(1).device.type == "cpu"
        assert not torch.zeros(1).is_cuda
        for made in (
            torch.ones(1, device=x.device),
            torch.ones(1).to(x.device),
            torch.ones(1).to(x),
        ):
            assert made.fake_device == device.device


def scaled_steps(scaler: Any, autocast: Any) -> None:
    model = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        with autocast:
            out = model(torch.zeros(2, 4, device="cuda"))
        assert out.dtype is torch.float16
        scaler.scale(out.square().mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.is_enabled()
    assert int(optimizer.state[model.weight]["step"]) == 2
    assert str(scaler._scale.fake_device) == "forecast:0"


def test_grad_scaler_and_autocast_for_cuda() -> None:
    """Both spellings of GradScaler and autocast work on the fake device, every step is made, and
    that is said.
    """
    with forecast_device() as device:
        scaled_steps(torch.amp.GradScaler("cuda"), torch.autocast("cuda", dtype=torch.float16))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            scaled_steps(torch.cuda.amp.GradScaler(), torch.cuda.amp.autocast())
        assert any(one.what.startswith("no gradient overflowed") for one in device.assumptions)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        assert torch.get_autocast_dtype("cuda") is torch.bfloat16
        assert not torch.is_autocast_enabled()
        with device.autocast(), torch.autocast("cuda"):
            assert torch.is_autocast_enabled()
            assert torch.is_autocast_enabled("cuda")
            assert not torch.is_autocast_enabled("cpu")


def test_streams_and_events_of_user_code_do_nothing() -> None:
    """A step that copies on another stream, or measures its own time, runs through."""
    with forecast_device():
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        end.record(torch.cuda.current_stream())
        end.synchronize()
        assert end.query()
        assert start.elapsed_time(end) > 0


def test_compile_is_forecast_as_eager() -> None:
    """torch.compile, as a call and as a decorator, gives the eager code and an assumption."""
    with forecast_device() as device:
        model = torch.compile(nn.Linear(2, 2).cuda(), mode="max-autotune")
        model.compile()

        @torch.compile(fullgraph=True)
        def double(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        assert double(model(torch.zeros(1, 2, device="cuda"))).shape == (1, 2)
        assert type(model) is nn.Linear
        assert any("torch.compile" in one.what for one in device.assumptions)


def test_nothing_is_saved(tmp_path: Path) -> None:
    """What the step writes by torch is left out and said; a copy in memory is made."""
    kept, copy = tmp_path / "best.pt", io.BytesIO()
    kept.write_bytes(b"of a real run")
    with forecast_device() as device:
        model = nn.Linear(2, 2).cuda()
        torch.save(model.state_dict(), kept)
        torch.save(obj=model, f=str(kept))
        torch.save({"step": 1}, copy)
        copy.seek(0)
        assert torch.load(copy) == {"step": 1}
        said = {one.what for one in device.assumptions}
        assert any("torch.save" in what for what in said)
    assert kept.read_bytes() == b"of a real run"
    torch.save(torch.ones(1), kept)
    assert torch.load(kept).tolist() == [1.0]


def test_transformers_does_not_notice() -> None:
    """Its test for fake tensors, which leads to masks that no real run has, says no meanwhile."""
    found = pytest.importorskip("transformers.utils.import_utils")
    before = found.is_fake_tensor
    with forecast_device():
        assert not found.is_fake_tensor(torch.zeros(1))
    assert found.is_fake_tensor is before
