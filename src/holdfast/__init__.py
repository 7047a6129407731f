"""holdfast keeps PyTorch training alive, correct and inside its memory, and says why when it cannot."""
__version__ = "0.1.0"
