"""The ground floor: errors, events, policy, clock and durable writes.

Standard library only, never torch.
"""
