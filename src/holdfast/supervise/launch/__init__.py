"""Starting a command, again if that helps, and its run directory."""
