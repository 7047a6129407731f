"""Examples that the help of each command ends with."""

from __future__ import annotations

# For each command: a command line and what it does.
_EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "run": (
        ("holdfast run -- python train.py", "watch, restart and explain a script"),
        ("holdfast run --resume -- python train.py", "also save and resume it"),
        (
            "holdfast run --run-dir runs/a -- torchrun --nproc-per-node 2 train.py",
            "name the run directory",
        ),
    ),
    "watch": (
        ("holdfast watch runs/last", "the newest run"),
        ("holdfast watch runs/", "all runs, one line each"),
    ),
    "attach": (
        ("holdfast attach 4711", "look at process 4711"),
        ("holdfast attach --seconds 30 4711", "observe it for longer"),
    ),
    "save": (
        ("holdfast save runs/a", "save now"),
        ("holdfast save --timeout 600 runs/a", "wait longer for a large checkpoint"),
    ),
    "stop": (("holdfast stop runs/a", "save, then stop"),),
    "explain": (
        ("holdfast explain runs/last", "why the newest run ended"),
        ("holdfast explain slurm-4711.out", "why the job that wrote this log ended"),
        ("kubectl logs my-pod | holdfast explain -", "the same from a pipe"),
        ("holdfast explain H101", "what a rule means and what to do"),
    ),
    "report": (("holdfast report runs/last", "write runs/last/report.html"),),
    "events": (
        ("holdfast events runs/last", "all events"),
        ("holdfast events --kind skip_step runs/last", "only skipped steps"),
    ),
    "metrics": (
        ("holdfast metrics --tensorboard tb runs/last", "for TensorBoard"),
        ("holdfast metrics --follow --wandb my-project runs/last", "for W&B, as the run goes on"),
    ),
    "plan": (
        ("holdfast plan train.py:build", "which common GPUs does a step fit?"),
        ("holdfast plan --device T4 train.py:build", "does it fit a T4?"),
        ("holdfast plan --device 24GiB --device H100 train.py:build", "compare two devices"),
        (
            "holdfast plan --micro-batch-size 8 --global-batch-size 64 train.py:build",
            "with accumulated gradients",
        ),
        (
            "holdfast plan --vary seq_len train.py:build",
            "the longest sequence, if build has a parameter seq_len",
        ),
        (
            "holdfast plan --set seq_len=2048 --set lora_r=16 config.json",
            "fine-tune a Hugging Face model with LoRA",
        ),
        (
            "holdfast plan --gpus 8 --shard full --device H100 train.py:build",
            "one of 8 GPUs with FSDP",
        ),
    ),
    "compare": (
        ("holdfast compare runs/a runs/b", "write compare.html"),
        ("holdfast compare --fail-on-regression 5% runs/a runs/b", "in CI"),
    ),
    "checkpoints": (
        ("holdfast checkpoints runs/a", "list them"),
        ("holdfast checkpoints --export model.safetensors runs/a", "export the newest weights"),
    ),
    "quarantine": (
        ("holdfast quarantine runs/a", "list the samples"),
        ("holdfast quarantine --release-all runs/a", "read all of them again"),
    ),
    "doctor": (("holdfast doctor", "check this machine"),),
    "chaos": (
        ("holdfast chaos -- python train.py", "all faults, within 10 minutes"),
        ("holdfast chaos --only kill,save -- python train.py", "only these"),
        (
            "holdfast chaos --exhaustive-saves --budget 1h -- python train.py",
            "kill at every point of a save",
        ),
    ),
}


def examples_of(command: str) -> str:
    """Return the examples of a command as text for the end of its help."""
    # Click rewraps a paragraph unless it begins with a line that contains only "\b".
    lines = ["\b", "Examples:"]
    for command_line, purpose in _EXAMPLES[command]:
        lines += [f"  # {purpose}", f"  {command_line}"]
    return "\n".join(lines)
