"""Models that are damaged or mean harm: imported, built and run, each in a process of its own."""
