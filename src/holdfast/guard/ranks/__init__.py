"""Several ranks that train one model: what they exchange, and how they reach the same decisions.

Read `one` first: `OneRank` is the interface through which the guard uses its ranks, implemented for
a single process. `ranks` implements it for several. It uses `replicated` (DDP) or `sharded`
(FSDP2), which `recognise` chooses. In every step the ranks exchange one `row` of numbers;
everything else is sent as `messages` through the store of the process group.

If a rank runs out of memory, it completes the collectives that the other ranks are waiting for
(`tape`, `collectives`), and all ranks attempt the step again (`Ranks.pay`). If its optimizer does,
it receives the state of another rank (`shared_state`). If a rank fails in any other way, or ends
before it has created its guard (`arrival`), all ranks end with an error that names it. `pace` finds
slow ranks, and `own_tensors` state that differs between ranks.
"""
