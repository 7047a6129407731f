"""The command line: it parses arguments, prints text or JSON, and chooses the exit code.

Read in this order: ``main`` (the entry point and the table of commands), ``output`` (what all
commands share: JSON, errors, exit codes), then one module per command. What a command finds out is
computed in the package that it names, such as `supervise` for ``run``; nothing is decided here.

Each module is imported only when its command is called, and importing them all imports no torch.
"""
