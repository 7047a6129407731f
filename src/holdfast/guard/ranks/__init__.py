"""Train one model on several ranks, which exchange values and agree on decisions.

Read in this order:

1. `interface`: `Ranks`, the interface through which the guard works with the ranks of a run.
2. `single_process`: `SingleProcess`, for a process that trains alone. Most methods do nothing.
3. `row` and `row_exchange`: the numbers that ranks exchange in each step. `decisions` derives stops
   and saves from them, and `item_weights` the weights of the gradients.
4. `process_group`: `ProcessGroupRanks`, the common base class for several ranks. `ddp` and `fsdp`
   complete it for DistributedDataParallel and ``fully_shard``. `replicated` and `sharded` handle
   the collectives of such models, behind the interface in `distributed_model`. `recognize` chooses
   the right class for a model.
5. `messages`: everything else that ranks send each other, through the store of the process group.

This is one step on two ranks. All exchanges are collectives of the process group, except for
messages, which are exchanged only if an attempt has failed or its gradients are not finite::

              rank 0                                      rank 1
    begin_attempt()           <=== buffers ===>    begin_attempt()        DDP: those of rank 0
    loss_fn(batch)            <=== weights ===>    loss_fn(batch)         fully_shard: gathered
    weighted_loss()           <==== rows =====>    weighted_loss()        starts to gather the rows
    backward()                <== gradients ==>    backward()             averaged over the ranks
    combine()                                      combine()              waits for the rows
    inspect_gradients()       <==== norms ====>    inspect_gradients()    fully_shard only
    accepts()                                      accepts()
      all is finite: True                            all is finite: True  both commit the step
      otherwise               <-- messages --->      otherwise            has an attempt failed?
        yes: False                                     yes: False         both repeat the attempt
        no: True                                       no: True           both skip the step

In a step that is decided late, the first part is the same, but the rows stay on the device, and no
rank waits::

    combine_without_reading()                      combine_without_reading()
    end_late_attempt()                             end_late_attempt()
      ...the next step, as far as end_late_attempt()...
    receive_stops_and_saves()                      receive_stops_and_saves()
      or, if the step was refused:
    agree_on_failure()        <-- messages --->    agree_on_failure()       both repeat the step

A rank that runs out of memory calls `complete_collectives` instead of `accepts`. It starts the
collectives that the other ranks are waiting for, and sends NaN, so that these ranks reach `accepts`
(`tape`, `collectives`). If the optimizer of a rank runs out of memory, the rank receives the state
of another rank (`state_transfer`). If a rank fails in any other way, or exits before it has created
its guard (`arrival`), all ranks exit with an error that names this rank (`failures`, `listener`).

`origin` finds the rank on which NaN or Inf appeared, and `pace` detects a slow rank.
`differing_state` finds state that differs between ranks, and `rank_states` gathers it for a
checkpoint. With `shared_writers`, each rank writes a part of a checkpoint.
"""
