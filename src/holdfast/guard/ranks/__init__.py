"""Several ranks that train one model: what they exchange, and how they reach the same decisions.

Read `interface` first: `Ranks` is the interface through which the guard uses its ranks.
`single_process` implements it for a process that trains alone. `process_group` implements what
DistributedDataParallel (`ddp`, with the model in `replicated`) and ``fully_shard`` (`fsdp`, with
the model in `sharded`) have in common. `recognise` chooses between them.

In every step the ranks exchange one `row` of numbers (`row_exchange`), from which all of them reach
the same `decisions`; everything else is sent as `messages` through the store of the process group.

If a rank runs out of memory, it completes the collectives that the other ranks are waiting for
(`tape`, `collectives`), and all ranks attempt the step again. If its optimizer does, it receives
the state of another rank (`shared_state`). If a rank fails in any other way, or ends before it has
created its guard (`arrival`), all ranks end with an error that names it. `origin` finds the rank on
which NaN or Inf appeared, `pace` a slow rank, and `own_tensors` the state that differs between
ranks, which `rank_states` gathers for a checkpoint.
"""
