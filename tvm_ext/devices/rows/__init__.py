"""The device tables: a row for each device, a fact for each number.

Not here: looking rows up (`devices.device_db`); what a field means (`devices.hal`).
Start at `accelerators`, with one row.
"""
