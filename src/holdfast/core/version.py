"""The version of holdfast, in a module that every layer can import without the root package."""

__version__ = "0.1.0"
