"""Several ranks that train one model: what they exchange, and how they reach the same decisions.

Read in this order:

1. `interface`: `Ranks`, through which the guard uses its ranks.
2. `single_process`: `SingleProcess`, for a process that trains alone. It does nothing.
3. `row` and `row_exchange`: the numbers that ranks exchange in each step, and the `decisions` about
   stops and saves that follow from them.
4. `process_group`: `ProcessGroupRanks`, which several ranks have in common. `ddp` and `fsdp`
   complete it for DistributedDataParallel and ``fully_shard``; `replicated` and `sharded` know the
   collectives of such a model (`distributed_model`). `recognize` chooses between them.
5. `messages`: everything else that ranks send each other, through the store of the process group.

This is one step of two ranks. All exchanges are collectives of the process group, except for the
messages, which are only exchanged if an attempt has failed or its gradients are not finite::

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

A rank that runs out of memory calls `complete_collectives` instead of `accepts`: it starts the
collectives that the other ranks are waiting for, with NaN, so that they arrive in `accepts` (`tape`
and `collectives`). If its optimizer runs out of memory, it receives the state of another rank
(`state_transfer`). If a rank fails in any other way, or ends before it has created its guard
(`arrival`), all ranks end with an error that names it (`failures`, `listener`).

`origin` finds the rank on which NaN or Inf appeared, `pace` a slow rank, and `differing_state` the
state that differs between ranks, which `rank_states` gathers for a checkpoint (`shared_writers`).
"""
