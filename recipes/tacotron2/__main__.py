"""``python -m recipes.tacotron2``."""

from recipes.tacotron2.train import main

if __name__ == "__main__":  # workers that are spawned import this file
    main()
