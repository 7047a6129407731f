"""The version of holdfast, where every layer can read it without importing the root package."""

__version__ = "0.1.0"
