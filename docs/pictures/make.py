"""Make the pictures in docs/assets: train, write the pages, and photograph them in Chromium.

Run it from a checkout, in the environment that `make test` sets up:

    .venv/bin/python -m docs.pictures.make            # all pictures; about ten minutes
    .venv/bin/python -m docs.pictures.make compare    # only this one
    .venv/bin/python -m docs.pictures.make compare --look DIR   # also at 400 px and in the dark

With `--look`, the pictures of narrow and dark pages go to DIR, to be looked at. They are not kept.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from PIL import Image

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ASSETS = ROOT / "docs" / "assets"
HOLDFAST = [sys.executable, "-m", "holdfast"]
CHROMIUM_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--hide-scrollbars",
    # The curves are drawn by a script. Chromium lets this much time of the page's clock pass.
    "--virtual-time-budget=10000",
)
# A picture is 1,400 pixels wide, and shows a window of 1,000 CSS pixels. In a README of half that
# width, its text can still be read.
WIDTH = 1000
SCALE = 1.4
# The directory that pages show in place of the temporary one.
SHOWN_DIRECTORY = "/home/ada/digits"
# A picture has at most this many colors. Pages have few, so the file is a quarter of the size.
COLORS = 128


class Picture(NamedTuple):
    """How one picture is made."""

    # Trains in the given directory, and returns the path of the page.
    make_page: Callable[[Path], Path]
    # The height of the part of the page that is shown, in CSS pixels.
    height: int


def main() -> None:
    """Make the pictures that are named on the command line, or all of them."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PICTURES))
    parser.add_argument("--look", type=Path, help="directory for narrow and dark pictures")
    args = parser.parse_args()
    for name in args.names or PICTURES:
        with tempfile.TemporaryDirectory() as directory:
            page = PICTURES[name].make_page(Path(directory))
            make_anonymous(page, Path(directory))
            photograph(page, ASSETS / f"{name}.png", height=PICTURES[name].height)
            if args.look is not None:
                look(page, args.look / name)


def make_failed_page(directory: Path) -> Path:
    """Return the report of an unguarded run that fails in the last batch of its first epoch."""
    copy_program("train.py", directory)
    run(directory, *HOLDFAST, "run", "--run-dir", "runs/train", "--", "python", "train.py")
    return report(directory, "runs/train")


def make_unscaled_page(directory: Path) -> Path:
    """Return the report of a guarded run that ends with exit code 0 and learns nothing."""
    training = ["python", "-m", "recipes.classifier", "--fault", "unscaled-inputs"]
    run(directory, *training, "--run-dir", "runs/unscaled")
    return report(directory, "runs/unscaled")


def make_compare_page(directory: Path) -> Path:
    """Return the comparison of three runs with different learning rates."""
    copy_program("train.py", directory)
    training = ["python", "train.py", "--drop-last", "--batch-size", "32", "--epochs", "20"]
    names = []
    for lr in ("0.0001", "0.003", "0.3"):
        names.append(f"runs/lr-{lr}")
        command = [*training, "--lr", lr]
        run(directory, *HOLDFAST, "run", "--run-dir", names[-1], "--", *command)
    run(directory, *HOLDFAST, "compare", *names, "--self-contained", "--out", "page.html")
    return directory / "page.html"


def make_chaos_page(directory: Path) -> Path:
    """Return the page of a campaign of faults against a script that resumes inexactly."""
    copy_program("resume.py", directory)
    options = ["--only", "kill,term,save,nan", "--page", "page.html"]
    run(directory, *HOLDFAST, "chaos", *options, "--", "python", "resume.py")
    return directory / "page.html"


PICTURES = {
    "report-failed": Picture(make_failed_page, height=850),
    "report": Picture(make_unscaled_page, height=690),
    "compare": Picture(make_compare_page, height=1080),
    "chaos": Picture(make_chaos_page, height=810),
}


def copy_program(name: str, directory: Path) -> None:
    """Copy a training script beside this module to the directory in which it is to run."""
    shutil.copy(HERE / name, directory)


def run(directory: Path, *command: str) -> None:
    """Run a command in a directory, with this checkout's packages and this interpreter.

    Its exit code does not matter: a run that fails and a campaign that finds something exit with 1.
    """
    environment = dict(os.environ)
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    # With several threads, the time of a step would show how busy this machine is.
    environment["OMP_NUM_THREADS"] = "1"
    environment["PYTHONPATH"] = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    subprocess.run(command, cwd=directory, env=environment, check=False)  # noqa: S603


def report(directory: Path, run_directory: str) -> Path:
    """Write the page of a run as a single file, and return its path."""
    run(
        directory,
        *HOLDFAST,
        *("report", run_directory, "--self-contained", "--out", "page.html"),
    )
    return directory / "page.html"


def make_anonymous(page: Path, directory: Path) -> None:
    """Replace the paths of this machine in a page."""
    text = page.read_text(encoding="utf-8")
    text = text.replace(str(directory), SHOWN_DIRECTORY)
    text = text.replace(str(Path(sys.executable).parent) + "/", "")
    text = text.replace(str(ROOT), "/home/ada/holdfast")
    page.write_text(text, encoding="utf-8")


def photograph(
    page: Path, picture: Path, *, height: int, width: int = WIDTH, flags: tuple[str, ...] = ()
) -> None:
    """Write the top of a page as a PNG with few colors.

    Args:
        page: The page, an HTML file.
        picture: Where to write the PNG.
        height: The height of the window in CSS pixels.
        width: The width of the window in CSS pixels.
        flags: Further flags of Chromium.
    """
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("Chromium is not installed.")
    picture.parent.mkdir(parents=True, exist_ok=True)
    command = [
        browser,
        *CHROMIUM_FLAGS,
        *flags,
        f"--force-device-scale-factor={SCALE}",
        f"--window-size={width},{height}",
        f"--screenshot={picture}",
        page.as_uri(),
    ]
    subprocess.run(command, check=True, capture_output=True)  # noqa: S603
    with Image.open(picture) as image:
        image.convert("RGB").quantize(COLORS).save(picture, optimize=True)


def look(page: Path, directory: Path) -> None:
    """Photograph a page as on a narrow screen and with a dark theme, at full length."""
    dark = ("--blink-settings=preferredColorScheme=0",)
    photograph(page, directory / "wide.png", height=3000)
    photograph(page, directory / "dark.png", height=3000, flags=dark)
    # Headless Chromium has no windows narrower than 500 pixels, so a page in a frame is narrow.
    frame = page.with_name("narrow.html")
    style = "border:0;width:400px;height:5000px"
    frame.write_text(
        f'<body style="margin:0"><iframe src="{page.name}" style="{style}"></iframe></body>',
        encoding="utf-8",
    )
    photograph(frame, directory / "narrow.png", width=500, height=5000)


if __name__ == "__main__":
    main()
