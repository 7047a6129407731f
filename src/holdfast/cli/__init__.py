"""The command line: argv in, text or JSON out, exit codes that mean something."""
