"""``python -m recipes.tacotron2``."""

from recipes.tacotron2.train import main
from recipes.training import at_the_command_line

if __name__ == "__main__":  # workers that are spawned import this file
    with at_the_command_line():
        main()
