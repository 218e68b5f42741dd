"""What a device is, with unit and source of every number: its abstraction, the tables, and probing the CPU at hand.

Not here: what a kernel costs on it (`cost`); compilers for it (`toolchains`).
Start at `device_db.device_for_target`.
"""
