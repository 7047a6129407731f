"""``python -m recipes.classifier``; a module of its own, since workers that are spawned import it again."""

from recipes.classifier.train import main

if __name__ == "__main__":
    main()
