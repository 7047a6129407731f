"""At the start of a step, copy the state that an attempt may change; restore it after a failure.

`work` defines the input of a step. `buffers` and `states` copy state that a forward pass may
change, and `trees` copies and compares nested state. `created_state` creates optimizer state before
the first step, `loss_scale` implements loss scaling for fp16, and `earlier_gradients` holds the
gradients of earlier batches in a step over several batches. `trained_weights` detects that a script
has replaced the trained weights.
"""
