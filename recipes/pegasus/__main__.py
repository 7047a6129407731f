"""``python -m recipes.pegasus``."""

from recipes.pegasus.train import main
from recipes.training import at_the_command_line

if __name__ == "__main__":  # workers that are spawned import this file too
    with at_the_command_line():
        main()
