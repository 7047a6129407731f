"""Runs on a fake device of a process of its own: what attention, recurrent layers and packing do there, as JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.unit.forecast.allocations import FakeAllocations

from holdfast.forecast.fake.device import ForecastDevice, forecast_device


class Seen:
    """What one case did: the last node of its graph, bytes kept by it, sizes of all its storages, and the peak."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}

    def forward_and_backward(self, name: str, run: Callable[[], torch.Tensor]) -> None:
        watch = FakeAllocations("privateuse1")
        with watch:
            out = run()
            kept, forward = watch.live, list(watch.sizes)
            node = out.grad_fn.name() if out.grad_fn is not None else ""
            out.backward(torch.empty_like(out))
        self.facts[name] = {
            "node": node,
            "kept": kept,
            "forward": forward,
            "backward": watch.sizes[len(forward) :],
            "peak": watch.peak,
            "dtype": str(out.dtype),
            "shape": list(out.shape),
        }


def leaf(device: ForecastDevice, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, device=device.device, dtype=dtype, requires_grad=True)


def attention(device: ForecastDevice, seen: Seen) -> None:
    half = torch.bfloat16
    q = leaf(device, 2, 4, 128, 64, dtype=half)
    narrow = leaf(device, 2, 2, 128, 64, dtype=half)
    mask = torch.ones(2, 1, 128, 128, dtype=torch.bool, device=device.device)
    attend = functional.scaled_dot_product_attention
    seen.forward_and_backward("flash", lambda: attend(q, q, q))
    seen.forward_and_backward("masked", lambda: attend(q, q, q, attn_mask=mask))
    seen.forward_and_backward("grouped", lambda: attend(q, narrow, narrow, enable_gqa=True))
    seen.forward_and_backward("padded", lambda: attend(*[leaf(device, 2, 4, 128, 60, dtype=half)] * 3))
    single = leaf(device, 2, 4, 128, 64)
    seen.forward_and_backward("single", lambda: attend(single, single, single))
    bias = leaf(device, 2, 4, 128, 128)
    seen.forward_and_backward("bias", lambda: attend(single, single, single, attn_mask=bias))
    seen.facts["bias gradient"] = list(bias.grad.shape)
    with sdpa_kernel(SDPBackend.MATH):
        seen.forward_and_backward("math", lambda: attend(single, single, single))
    layer = nn.MultiheadAttention(64, 4, batch_first=True).to(device.device)
    x = leaf(device, 2, 128, 64)
    watch = FakeAllocations("privateuse1")
    with watch:
        layer(x, x, x, need_weights=False)
    seen.facts["largest in nn.MultiheadAttention"] = max(watch.sizes)
    recomputed = FakeAllocations("privateuse1")
    with recomputed:
        checkpoint(lambda a: attend(a, a, a), q, use_reentrant=False).sum().backward()
    seen.facts["row sums with recomputation"] = recomputed.sizes.count(2 * 4 * 128 * 4)


def recurrent(device: ForecastDevice, seen: Seen) -> None:
    x = leaf(device, 5, 4, 16)
    for kind, layer in (("lstm", nn.LSTM(16, 32)), ("gru", nn.GRU(16, 32)), ("rnn", nn.RNN(16, 32))):
        layer.to(device.device)
        seen.forward_and_backward(kind, lambda layer=layer: layer(x)[0])
        seen.facts[f"{kind} gradients share"] = len({p.grad.untyped_storage()._cdata for p in layer.parameters()})
    stacked = nn.LSTM(16, 32, num_layers=2, bidirectional=True, dropout=0.1, batch_first=True).to(device.device)
    seen.forward_and_backward("stacked", lambda: stacked(x)[0])
    seen.forward_and_backward("projected", lambda: nn.LSTM(16, 32, proj_size=8).to(device.device)(x)[0])
    layer = nn.LSTM(16, 32).to(device.device)
    with torch.autocast(device.device.type, dtype=torch.bfloat16):
        seen.forward_and_backward("autocast", lambda: layer(x)[0])
    seen.facts["autocast gradient"] = str(layer.weight_ih_l0.grad.dtype)
    with torch.backends.cudnn.flags(enabled=False):
        seen.forward_and_backward("without cuDNN", lambda: layer(x)[0])
    seen.forward_and_backward("gru cell", lambda: nn.GRUCell(16, 32).to(device.device)(leaf(device, 4, 16)))
    seen.forward_and_backward("lstm cell", lambda: nn.LSTMCell(16, 32).to(device.device)(leaf(device, 4, 16))[0])
    watch = FakeAllocations("privateuse1")
    with watch:
        checkpoint(lambda a: layer(a)[0], x, use_reentrant=False).sum().backward()
    seen.facts["reserves with recomputation"] = watch.sizes.count(5 * 5 * 4 * 32 * 4)
    seen.facts["uncertain"] = dict(device.uncalibrated.calls)


def normalization(device: ForecastDevice, seen: Seen) -> None:
    x, weight = (leaf(device, *shape, dtype=torch.bfloat16) for shape in ((8, 128, 256), (256,)))
    seen.forward_and_backward("rms norm", lambda: functional.rms_norm(x, (256,), weight))
    seen.facts["rms norm gradients"] = [list(x.grad.shape), list(weight.grad.shape)]


def sequences(device: ForecastDevice, seen: Seen) -> None:
    layer = nn.LSTM(16, 32, batch_first=True).to(device.device)

    def packed(lengths: Any) -> torch.Tensor:
        data = pack_padded_sequence(leaf(device, 4, 7, 16), lengths, batch_first=True, enforce_sorted=False)
        seen.facts.setdefault("rows", []).append(data.data.shape[0])
        return pad_packed_sequence(layer(data)[0], batch_first=True)[0]

    seen.forward_and_backward("known lengths", lambda: packed([7, 3, 2, 1]))
    seen.forward_and_backward("unknown lengths", lambda: packed(torch.randint(1, 7, (4,))))
    scores = leaf(device, 50, 4, 20)
    targets = torch.zeros(4, 10, dtype=torch.long, device=device.device)
    lengths = torch.full((4,), 50), torch.full((4,), 10)
    seen.forward_and_backward("ctc", lambda: functional.ctc_loss(scores.log_softmax(-1), targets, *lengths))
    seen.facts["assumed"] = [assumption.what for assumption in device.assumptions]


def main() -> None:
    with forecast_device() as device:
        seen = Seen()
        for part in (attention, recurrent, normalization, sequences):
            part(device, seen)
    print(json.dumps(seen.facts), flush=True)  # noqa: T201
    os._exit(0)  # as the forecast's own child ends: threads of a device that is none do not hold it up


if __name__ == "__main__":
    main()
