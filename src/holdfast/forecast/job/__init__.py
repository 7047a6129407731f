"""What a user's `build()` returns, and the process that it is traced in."""
