"""``python -m recipes.pegasus``."""

from recipes.pegasus.train import main

if __name__ == "__main__":  # workers that are spawned import this file too
    main()
