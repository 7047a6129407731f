"""``python -m recipes.asr``."""

from __future__ import annotations

from recipes.asr.train import main

if __name__ == "__main__":
    main()
