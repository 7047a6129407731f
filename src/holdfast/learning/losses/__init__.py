"""Observe calls of loss functions, with their arguments and targets.

``function_mode`` intercepts every call of a loss function, and checks its arguments (``arguments``,
``sources``) and targets (``targets``). ``sites`` stores the results for each place in the script
where a loss is computed.
"""
