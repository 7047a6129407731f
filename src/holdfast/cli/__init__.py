"""The command line: it parses arguments, prints text or JSON, and chooses the exit code.

Read in this order: ``main`` (the entry point and the table of commands), ``output`` (what all
commands share: JSON, errors, exit codes), then one module per command. The options of a command are
the parameters of the function that `COMMANDS` in ``main`` names for it, with their help texts.

Nothing is decided here: the results of a command are computed in another package, such as
`supervise` for ``run``.

Each module is imported only when its command is called, and importing them all imports no torch.
"""
