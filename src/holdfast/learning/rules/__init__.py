"""The rules about learning: pure functions from facts to findings."""
