"""Several ranks that train one model: what they tell each other, and how all decide the same.

Read `one` first: it lists what the guard asks of its ranks, with the answers of a single process.
`ranks` answers for several. It uses `replicated` (DDP) or `sharded` (FSDP2), which `recognise`
chooses. In every step the ranks exchange one `row` of numbers; everything else is said in
`messages` over the store of the process group. `tape` and `collectives` let a rank whose attempt
has failed complete the collectives that the others wait in.
"""
