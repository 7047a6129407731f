"""The version, where every floor can read it without importing the root package."""

__version__ = "0.1.0"
