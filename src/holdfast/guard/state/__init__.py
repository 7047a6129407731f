"""Copy the state that an attempt may change at the beginning of a step, and restore it afterwards.

`work` is the input of a step. `buffers` and `states` copy what a forward pass may change; `trees`
has the operations on nested state. `trained_weights` notices weights that were swapped.
"""
