"""How many workers: what the machine has, what loading costs, what will go wrong, and the choice."""
