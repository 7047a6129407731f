"""Copy the state that an attempt may change at the start of a step, and restore it if it fails.

`work` defines the input of a step. `buffers` and `states` copy the state that a forward pass may
change, and `trees` copies and compares nested state. `trained_weights` detects whether a script has
swapped the weights.
"""
