"""The GAN: two players that do not leak into each other, one loss scale, less memory, and a
kernel that may die.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recipes.classifier.images import find_source, write_idx
from recipes.gan import forecast
from recipes.gan.data import Images
from recipes.gan.players import Players, play
from recipes.gan.quality import Judge
from recipes.gan.train import POLICY, GanOptions, main, make_job, train
from recipes.training import digest
from tests.own_process import in_own_process
from tests.unit.forecast.allocations import real_allocations

import holdfast
from holdfast.checkpoint.store import Store

pytest.importorskip("sklearn")

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
NOTEBOOK = ROOT / "recipes" / "gan" / "gan.ipynb"
# In a process of its own: the kernel's sockets and loops stay out of the other tests.
EXECUTE = """
import sys, nbformat, nbclient
notebook = nbformat.read(sys.argv[1], 4)
place = {"metadata": {"path": sys.argv[2]}}
nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=place).execute()
told = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
images = [output for output in notebook.cells[-1]["outputs"] if "image/png" in output.get("data", {})]
print(len(images), told)
"""


def make_players(size: int = 8, width: int = 8, **settings: Any) -> Players:
    torch.manual_seed(3)
    return Players(size=size, device=CPU, latent=8, width=width, **settings)


def make_batch(count: int = 8, size: int = 8) -> tuple[torch.Tensor, ...]:
    chance = torch.Generator().manual_seed(4)
    images = torch.rand(count, 1, size, size, generator=chance) * 2 - 1
    return (images, *torch.randn(2, count, 8, generator=chance))


def guard_of(run_dir: Any, players: Players, **policy: Any) -> holdfast.Guard:
    settings = {"save_interval_steps": None, **policy}
    return holdfast.Guard(
        run_dir,
        model=players.models,
        optimizer=players.optimizers,
        policy={"preset": "gan"},
        **settings,
    )


# --- the players


@pytest.mark.parametrize("regularizer", ["r1", "spectral"])
def test_no_graph_leaks_from_step_to_step(tmp_path, regularizer):
    """The number of live tensors, and their bytes, are the same after every pair of steps."""
    seen = in_own_process(live_tensors_after_steps, tmp_path, regularizer)
    assert len(set(seen[2:])) == 1, seen


def live_tensors_after_steps(run_dir: Path, regularizer: str) -> list[tuple[int, int]]:
    players, batch = make_players(regularizer=regularizer), make_batch()
    seen = []
    with guard_of(run_dir, players, diagnose=False) as guard:
        for _ in range(5):
            results = play(guard, players, batch)
            assert not any(result.loss.requires_grad for result in results)
            del results
            gc.collect()
            live = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
            seen.append((len(live), sum(each.nbytes for each in live)))
            del live
    return seen


# What remains of the peak at most, as the README has it: how much scratch it holds depends on the
# processor. R1's gradient of a gradient keeps what was recomputed.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("regularizer", "shares"),
    [
        ("spectral", {"generator": 0.66, "discriminator": 0.67}),
        ("r1", {"generator": 0.61, "discriminator": 0.82}),
    ],
)
def test_recomputed_blocks_lower_the_peak_and_change_nothing(tmp_path, regularizer, shares):
    """With the blocks of both networks recomputed a step takes at most the memory said, bit for
    bit the same.
    """
    peaks, ends = {}, []
    blocks = [f"{name}.blocks.{number}" for name in shares for number in range(4)]
    for recompute in (False, blocks):
        players, batch = make_players(size=32, regularizer=regularizer), make_batch(32, size=32)
        losses = {"generator": players.generator_loss, "discriminator": players.discriminator_loss}
        with guard_of(
            tmp_path / str(len(ends)), players, recompute=recompute, diagnose=False
        ) as guard:
            for name, loss in losses.items():
                step = partial(guard.step, batch, loss, optimizer=name)
                peaks[name, bool(recompute)] = real_allocations(step)[0]
        ends.append(digest(players.all()))
    for name, share in shares.items():
        assert peaks[name, True] / peaks[name, False] < share + 0.05
    assert ends[0] == ends[1]


def test_what_a_forecast_is_made_of_trains_both_players(tmp_path):
    """The step that `holdfast plan` is given commits a step of each player on its sample batch."""
    built = forecast.build(4, size=8, width=4)
    with holdfast.Guard(tmp_path, model=built["model"], optimizer=built["optimizer"]) as guard:
        built["step"](guard, built["batch"])
        assert guard.global_step == 2


# --- data and figures


def test_images_are_padded_to_a_power_of_two_and_carry_their_noise(tmp_path):
    """MNIST's 28 x 28 become 32 x 32 from -1 to 1.

    A sample of another shape is an error that names it.
    """
    write_idx(tmp_path / "train-images-idx3-ubyte", np.full((3, 28, 28), 255))
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.arange(3))
    images = Images(find_source(tmp_path, train=True), 5)
    image, first, second = images[1]
    assert (image.shape, first.shape, second.shape) == ((1, 32, 32), (5,), (5,))
    assert float(image[0, 2:30, 2:30].min()) == 1.0
    assert float(image[0, :2].max()) == -1.0
    assert not torch.equal(first, second)
    other = Images(find_source(tmp_path, train=True), 5, (28, 27))
    with pytest.raises(ValueError, match=r"image 0 of .* has shape \(28, 28\)"):
        other[0]


@pytest.mark.slow  # torchmetrics takes seconds to import
def test_the_distance_is_that_of_the_features_moments():
    """It is 0 to the real images, one after the other measured, and else what the closed form
    gives.
    """
    chance = torch.Generator().manual_seed(0)
    real, other = (torch.randn(400, 1, 4, 4, generator=chance) * scale for scale in (1.0, 2.0))
    judge = Judge(real, torch.arange(400) % 3)
    first = judge.measure(other)
    assert judge.measure(real).frechet == pytest.approx(0.0, abs=1e-3)
    assert judge.measure(other) == first
    features = [judge._features(images).double().numpy() for images in (real, other)]
    (mean, spread), (mean_other, spread_other) = (
        (each.mean(axis=0), np.cov(each.T)) for each in features
    )
    root = np.sqrt(np.linalg.eigvals(spread @ spread_other).astype(complex)).real.sum()
    expected = ((mean - mean_other) ** 2).sum() + np.trace(spread + spread_other) - 2 * root
    assert first.frechet == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_it_learns_from_real_digits(tmp_path):
    """From the command line.

    The distance to real digits falls to a third, and images and report are there.
    """
    result = main(
        ["--run-dir", str(tmp_path), "--max-steps", "160", "--width", "16", "--sample-steps", "80"]
    )
    figures = result["figures"]
    assert figures["frechet_real"] < figures["frechet"] < figures["frechet_untrained"] / 3
    assert json.loads((tmp_path / "result.json").read_text())["global_step"] == 160
    assert sorted(int(path.stem) for path in (tmp_path / "images/drawn").iterdir()) == [80, 160]
    assert (tmp_path / "report.html").read_text().count('<img src="data:image/png;base64,') == 3


# --- lost processes


def kill_kernel(notebook: subprocess.Popen, run_dir: Path) -> None:
    """Kill the process that holds the run directory, once it has saved."""
    for _ in range(6000):
        assert notebook.poll() is None, notebook.communicate()
        if any(entry.global_step for entry in Store(run_dir / "checkpoints").entries()):
            break
        time.sleep(0.02)
    _, pid, _, _ = (run_dir / "lock").read_text().split()
    os.kill(int(pid), signal.SIGKILL)


@pytest.mark.slow
def test_a_notebook_survives_the_loss_of_its_kernel(tmp_path, request):
    """Its kernel is killed with SIGKILL half-way.

    Executed again it goes on, and ends as if undisturbed.
    """
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    run_dir, steps, width = tmp_path / "run", 40, 8
    settings = {"GAN_RUN_DIR": str(run_dir), "GAN_MAX_STEPS": str(steps), "GAN_WIDTH": str(width)}
    environment = {
        **os.environ,
        **settings,
        "HOLDFAST_SAVE_INTERVAL_STEPS": "4",
        "OMP_NUM_THREADS": "1",
    }

    def execute(place: Path) -> subprocess.Popen:
        notebook = subprocess.Popen(
            [sys.executable, "-c", EXECUTE, str(NOTEBOOK), str(place)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        request.addfinalizer(notebook.kill)  # without effect on one that has ended
        return notebook

    first = execute(NOTEBOOK.parent)
    kill_kernel(first, run_dir)
    assert "DeadKernelError" in first.communicate(timeout=300)[1]
    assert not (run_dir / "result.json").exists()
    second = execute(tmp_path)  # in a folder that has nothing to do with the repository
    told, errors = second.communicate(timeout=300)
    assert second.returncode == 0, errors
    assert told.startswith("2 ")
    begun = int(told.partition("begins at step ")[2].split()[0])
    assert 0 < begun < steps
    options = GanOptions(
        run_dir=tmp_path / "undisturbed", data_dir=run_dir / "data", max_steps=steps, width=width
    )
    expected = train(make_job(options), options, holdfast.Policy.from_yaml(POLICY))
    assert json.loads((run_dir / "result.json").read_text())["weights"] == expected["weights"]
