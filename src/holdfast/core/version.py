"""The version of holdfast, in a module that other modules import instead of the root package."""

__version__ = "0.1.0"
