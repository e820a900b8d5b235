"""The hooks engine (``use_reentrant=False``): saved-tensor hooks drop in forward, a replay regrows.

forward   engine > pack        slots are left with autograd instead of tensors
backward  unpack > replay      a slot gives its value, or has the call replayed
"""
