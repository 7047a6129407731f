"""Does guided attention help, and does the loss show whether the attention reads the text?

How: the recipe Tacotron 2, small, on sentences of espeak-ng, with guided attention and without, from the same
weights over the same batches. Every 50 steps both are measured on sentences that are held out, with the true frames
given. Needs espeak-ng.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from recipes.tacotron2 import espeak
from recipes.tacotron2.evaluation import evaluations
from recipes.tacotron2.train import main as train

from benchmarks.results_file import Result, read_options
from holdfast.recorder.reader import read_events

SIDES = {"guided attention": "1.0", "no guided attention": "0"}


def main() -> None:
    torch.set_num_threads(1)
    options = read_options("guided_attention", __doc__ or "")
    steps = 50 if options.quick else 200
    result = Result(options=options, parameters={"steps": steps, "clips": 240, "size": "small", "torch_threads": 1})
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        shared = ["--data", str(espeak.make_folder(place / "speech", 240)), "--features", str(place / "features.h5")]
        for side, weight in SIDES.items():
            run_dir = place / side.replace(" ", "_")
            limits = ["--max-steps", str(steps), "--evaluate-every", "50", "--device", "cpu"]
            done = train([*shared, *limits, "--run-dir", str(run_dir), "--guided-attention", weight])
            for name in ("diagonality", "sharpness", "mel_loss", "free_running_diagonality"):
                result.add_samples(f"{side}: {name} after {steps} steps", "", [done["figures"][name]])
            course = evaluations(read_events(run_dir / "recorder" / "rank0"))
            for name in ("step", "diagonality", "sharpness", "mel_loss"):
                result.samples[f"{side}: {name} of each evaluation"] = [round(each[name], 4) for each in course]
    result.write()


if __name__ == "__main__":
    main()
