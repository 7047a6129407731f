"""Features that are computed once and kept in a file."""
