"""The benchmark of steps on a GPU, with few steps of small models on the CPU.

Time on a GPU is scarce, so the script must not fail there first.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.step_overhead import Benchmark, Length, Setting
from benchmarks.results_file import Options, Result
from benchmarks.step_loops import FRAMEWORKS, silence_frameworks
from tests.own_process import in_own_process

SMALL = Setting(
    device="cpu",
    kind="mlp",
    lengths=(Length(milliseconds=2.0, at_most=1.04), Length(milliseconds=4.0)),
    conv_lengths=(Length(milliseconds=4.0),),
    first_milliseconds=2.0,
    first_steps=20,
    warm_steps=4,
    block_seconds=0.0,
    seconds_of_a_length=0.0,
)


def measured(file: Path) -> None:
    """Run the benchmark and write its result."""
    silence_frameworks()
    # The loops' run directories are left where pytest cleans up.
    tempfile.tempdir = str(file.parent)
    options = Options(name="gpu_step_overhead", quick=True, out=file)
    result = Result(options=options, parameters={})
    Benchmark(result, SMALL).run()
    result.write()


def test_every_loop_is_measured_beside_its_bare_loop(tmp_path: Path) -> None:
    """Each length has a ratio with its spread for each loop, and the late one has the target."""
    file = tmp_path / "result.json"

    in_own_process(measured, file)

    result: dict[str, Any] = json.loads(file.read_text())
    assert {"device", "versions", "commit", "parameters"} <= set(result)
    assert result["notes"] == []
    figures = {figure["what"]: figure for figure in result["figures"]}
    loops = ["guarded, fused, decide=now", "guarded, fused, decide=late"]
    loops += ["guarded, foreach, decide=now"]
    loops += [f"{name}, {how}" for name in FRAMEWORKS for how in ("fused", "foreach")]
    for length in ("2 ms", "4 ms"):
        for loop in loops:
            figure = figures[f"mlp, {length}, warm: time of {loop} over bare"]
            assert figure["samples"] == 4
            assert 0 < figure["least"] <= figure["value"] <= figure["most"] < math.inf
    targets = {what: figure.get("to_reach") for what, figure in figures.items() if "warm" in what}
    late = "mlp, 2 ms, warm: time of guarded, fused, decide=late over bare"
    assert {what for what, target in targets.items() if target} == {late}
