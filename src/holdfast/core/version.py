"""The version of holdfast. Other modules import it from here, not from the root package."""

__version__ = "0.1.0"
