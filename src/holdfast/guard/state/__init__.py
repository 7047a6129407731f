"""Copy the state that an attempt may change at the start of a step, and restore it if it fails.

`work` defines the input of a step. `buffers` and `states` copy the state that a forward pass may
change, and `trees` copies and compares nested state. `created_state` creates the state of
optimizers before their first step, `loss_scale` is the loss scaling of fp16, and
`earlier_gradients` holds the gradients of a step over several batches. `trained_weights` detects
whether a script has swapped the weights.
"""
