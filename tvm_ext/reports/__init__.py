"""What a build did, as a record, and that record as text and as a page.

Not here: filling it in (`recorder.py`); decisions about single kernels (`records`).
Start at `report.BuildReport`.
"""
