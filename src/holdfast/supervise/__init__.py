"""Acts outside the training process: starts, watches, signals and restarts it.

Never imports torch.
"""
