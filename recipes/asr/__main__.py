"""``python -m recipes.asr``."""

from __future__ import annotations

from recipes.asr.train import main
from recipes.training import at_the_command_line

if __name__ == "__main__":
    with at_the_command_line():
        main()
