"""``python -m recipes.separation``."""

from __future__ import annotations

from recipes.separation.train import main

if __name__ == "__main__":
    main()
