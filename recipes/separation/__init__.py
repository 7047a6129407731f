"""Speech separation.

The voices of a mixture, each by itself, by a small Conv-TasNet (arXiv 1809.07454).
"""
