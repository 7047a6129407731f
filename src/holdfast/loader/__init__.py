"""Samples: their order and seeds, how batches are cut, and the random state that augmentation
uses.
"""
