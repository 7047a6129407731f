"""The command-line interface: parse arguments, print text or JSON, and choose the exit code.

Read in this order: ``main`` (the entry point and the table of commands), ``output`` (JSON, errors
and exit codes of all commands), then one module per command. `COMMANDS` in ``main`` names the
function of each command. Its parameters are the options of the command, with their help texts.

The commands themselves are implemented in other packages, such as `supervise` for ``run``.

A module is imported only when its command is called. None of them imports torch at the top.
"""
