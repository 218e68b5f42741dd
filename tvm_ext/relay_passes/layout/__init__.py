"""Layouts: channel-blocked on CPUs, channels last on GPUs; as few transforms as pay.

Not here: constants repacked for one kernel (`relay_passes.pack_constants`).
Start at `block_channels.BlockChannels`.
"""
