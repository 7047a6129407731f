"""``python -m recipes.gan``; a module of its own, since workers that are spawned import it again."""

from recipes.gan.train import main

if __name__ == "__main__":
    main()
