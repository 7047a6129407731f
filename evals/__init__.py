"""Corpora: what failing and healthy trainings look like, and what holdfast says of them."""
