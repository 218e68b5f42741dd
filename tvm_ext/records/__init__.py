"""What the parts of a build hand on: decisions as frozen records, which print, compare, hash and round-trip through
JSON.

Not here: whoever decides, or acts on it. This room imports nothing of ours.
Start at `choice.KernelChoice`.
"""
