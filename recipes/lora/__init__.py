"""Fine-tuning by low-rank adapters; ``python -m recipes.lora``."""
