"""``python -m recipes.gpt``.

A module of its own, since workers that are spawned import it again.
"""

from recipes.gpt.train import main
from recipes.training import at_the_command_line

if __name__ == "__main__":
    with at_the_command_line():
        main()
