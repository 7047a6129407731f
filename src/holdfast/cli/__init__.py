"""The command-line interface: parse arguments, print text or JSON, and choose the exit code.

Read in this order: ``main`` (the entry point and the table of commands), ``output`` (JSON, errors
and exit codes of all commands), then one module per command. `COMMANDS` in ``main`` names the
function of each command. The function's parameters define the command's options and their help
texts.

The commands themselves are implemented in other packages, such as `supervise` for ``run``.

A command's module is imported only when the command is called, and never imports torch at module
level.
"""
