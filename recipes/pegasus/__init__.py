"""Pegasus of transformers, trained to summarise: ``python -m recipes.pegasus``."""
