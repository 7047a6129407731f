"""What is observed about losses: the calls of loss functions, their arguments and targets.

``function_mode`` sees every call. It hands each one to the place in the script where the loss is
computed (``sites``), with what its arguments (``arguments``, ``sources``) and its targets
(``targets``) show.
"""
