"""Saved state: trees of tensors in files without pickle, with a digest for every byte."""
