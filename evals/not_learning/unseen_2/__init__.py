"""Programs for `watch` in which people's own loops and habits occur, written without its rules."""
