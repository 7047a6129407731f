"""Observe losses: the calls of loss functions, their arguments and their targets.

``function_mode`` intercepts every call of a loss function. It checks the arguments (``arguments``,
``sources``) and the targets (``targets``), and records the results for the place in the script
where the loss is computed (``sites``).
"""
