"""A device that has no memory: shapes without data."""
