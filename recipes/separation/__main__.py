"""``python -m recipes.separation``."""

from __future__ import annotations

from recipes.separation.train import main
from recipes.training import at_the_command_line

if __name__ == "__main__":
    with at_the_command_line():
        main()
