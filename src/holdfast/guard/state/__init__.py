"""Copy the state that an attempt may change at the beginning of a step, and restore it afterwards.

`work` is the input of a step. `buffers` and `states` copy what a forward pass may change; `trees`
has the operations on nested state. `created_state` creates the state of optimizers before their
first step, `loss_scale` is the loss scaling of fp16, and `earlier_gradients` holds the gradients of
a step over several batches. `trained_weights` notices weights that were swapped.
"""
