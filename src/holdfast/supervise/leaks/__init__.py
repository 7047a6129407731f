"""The leak tracer: what grows inside a training process, who holds it, and which line keeps it."""
