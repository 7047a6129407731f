"""Diffusion of small images; ``python -m recipes.diffusion``."""
