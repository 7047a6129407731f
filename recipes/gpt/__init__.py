"""A small GPT over characters; ``python -m recipes.gpt``."""
