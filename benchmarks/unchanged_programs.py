"""Training programs by other people, as `unchanged_scripts` runs them.

The programs are not part of this repository. Each lies in a folder of its own with a ``run.json``,
whose entries are the fields of `Program`. A run takes place in a copy of that folder. Links in it
are kept, so that data sets are shared, and so is the order in which a directory is listed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_LONGEST_PLAIN_SECONDS = 600.0
# Durations in a program's output, which differ from run to run.
_DURATION = re.compile(r"\d+(\.\d+)?\s?(ms|s|sec|seconds)\b|time: \S+")
# The time and the host in the name of a folder, as TensorBoard's writer puts them there.
_TIME_AND_HOST = re.compile(r"[A-Z][a-z]{2}\d\d_\d\d-\d\d-\d\d_[\w.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A training program and how to run it.

    Args:
        name: Name of its folder.
        folder: The folder.
        argv: The command. ``python`` stands for the interpreter that runs the benchmark.
        cwd: Working directory, relative to the folder.
        env: Variables that are added to the environment. ``PATH+`` is put before ``PATH``.
        outputs: Glob patterns of the files that hold the results, relative to `cwd`.
        stdout: A regular expression for the lines of the output that state results, or None.
        steps: Approximate number of optimizer steps; 0 if the program has no torch optimizer.
        source: Where it comes from.
        changes: What had to be changed in it.
        notes: Why it is interesting.
    """

    name: str
    folder: Path
    argv: tuple[str, ...]
    cwd: str
    env: dict[str, str]
    outputs: tuple[str, ...]
    stdout: str | None
    steps: int
    source: str
    changes: tuple[str, ...]
    notes: str

    def command(self) -> list[str]:
        """Return the command line."""
        program, *arguments = self.argv
        if program == "python":
            program = sys.executable
        return [program, *arguments]

    def environment(self, extra_path: str | None = None) -> dict[str, str]:
        """Return the environment of the program.

        Args:
            extra_path: A folder that is added at the end of ``PYTHONPATH``.
        """
        environment = {**os.environ, **self.env}
        first_folders = environment.pop("PATH+", None)
        if first_folders:
            environment["PATH"] = first_folders + os.pathsep + os.environ.get("PATH", "")
        own_path = self.env.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (own_path, extra_path)))
        return environment

    def copy_to(self, folder: Path) -> Path:
        """Copy the program to a folder that does not exist yet, and return its working directory."""
        shutil.copytree(self.folder, folder, symlinks=True)
        return folder / self.cwd


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """The results of a run.

    Args:
        files: A digest of each result file, by its path.
        lines: The lines of the output that state results, without durations.
    """

    files: dict[str, str]
    lines: tuple[str, ...]

    def difference_from(self, plain: Results) -> str | None:
        """Return how these results differ from those of an undisturbed run, or None.

        A resumed run prints only the end of the output, so its lines have to be the last ones of
        the undisturbed run.
        """
        for path in sorted(self.files.keys() | plain.files.keys()):
            if path not in self.files:
                return f"{path} is missing"
            if path not in plain.files:
                return f"{path} is only there after a resume"
            if self.files[path] != plain.files[path]:
                return f"{path} differs"
        if plain.lines and not self.lines:
            return "no result was printed"
        expected_lines = plain.lines[len(plain.lines) - len(self.lines) :]
        for line, expected in zip(self.lines, expected_lines, strict=False):
            if line != expected:
                return f"printed {line!r} instead of {expected!r}"
        if len(self.lines) > len(plain.lines):
            return f"printed {len(self.lines)} results instead of {len(plain.lines)}"
        return None


def read_programs(folder: Path, names: Sequence[str] = ()) -> list[Program]:
    """Return the programs in a folder.

    Args:
        folder: Its subfolders hold the programs.
        names: Only these are returned, in this order. By default, all are returned by name.
    """
    if not names:
        names = sorted(path.parent.name for path in folder.glob("*/run.json"))
    return [read_program(folder / name) for name in names]


def read_program(folder: Path) -> Program:
    """Return the program in a folder."""
    description: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return Program(
        name=folder.name,
        folder=folder,
        argv=tuple(description["argv"]),
        cwd=description.get("cwd", "."),
        env=description.get("env", {}),
        outputs=tuple(description.get("outputs", ())),
        stdout=description.get("stdout"),
        steps=description.get("steps", 0),
        source=description.get("source", ""),
        changes=tuple(description.get("changes", ())),
        notes=description.get("notes", ""),
    )


def run_plainly(program: Program, folder: Path) -> tuple[Results, float]:
    """Run a program without holdfast in a copy of its folder.

    Returns:
        Its results, and the seconds that it took.

    Raises:
        RuntimeError: If it failed.
    """
    working_directory = program.copy_to(folder)
    started = time.monotonic()
    run = subprocess.run(
        program.command(),
        cwd=working_directory,
        env=program.environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_LONGEST_PLAIN_SECONDS,
        check=False,
    )
    if run.returncode != 0:
        raise RuntimeError(f"{program.name} failed: {run.stderr[-800:]}")
    return results_of(program, working_directory, run.stdout), time.monotonic() - started


def results_of(program: Program, working_directory: Path, output: str) -> Results:
    """Return the results that a run has left in its working directory and printed."""
    files = {}
    for pattern in program.outputs:
        for path in sorted(working_directory.glob(pattern)):
            name = _TIME_AND_HOST.sub("TIME", str(path.relative_to(working_directory)))
            files[name] = digest_of_file(path)
    lines = []
    if program.stdout is not None:
        expression = re.compile(program.stdout)
        for line in output.splitlines():
            if expression.search(line):
                lines.append(_DURATION.sub("DURATION", line))
    return Results(files=files, lines=tuple(lines))


def digest_of_file(path: Path) -> str:
    """Return a SHA-256 of what a result file holds.

    Of a file by ``torch.save``, these are the values if torch loads it without running its code.
    Otherwise it holds a whole module, and these are its tensors' bytes.
    """
    if not zipfile.is_zipfile(path):
        return hashlib.sha256(path.read_bytes()).hexdigest()
    digest = hashlib.sha256()
    try:
        content = torch.load(path, weights_only=True)
    except Exception:  # noqa: BLE001 - torch raises various types for what it does not load
        with zipfile.ZipFile(path) as archive:
            for name in sorted(archive.namelist()):
                if "/data/" in name:
                    digest.update(archive.read(name))
    else:
        for part in _parts_of(content):
            digest.update(part)
    return digest.hexdigest()


def _parts_of(value: Any) -> Iterator[bytes]:
    """Yield bytes that represent a value of nested containers, tensors and plain values."""
    if isinstance(value, torch.Tensor):
        dense = value.detach().contiguous()
        yield f"{dense.dtype} {tuple(dense.shape)}".encode()
        yield dense.reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield repr(key).encode()
            yield from _parts_of(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _parts_of(entry)
    else:
        yield repr(value).encode()
