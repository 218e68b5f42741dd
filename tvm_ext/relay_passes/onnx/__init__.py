"""ONNX in, Relax out: load, check, clean, decompose, fold and bind, then stock TVM's importer.

Not here: passes over Relax, whatever the graph came from (`relay_passes`).
Start at `import_model.import_model`.
"""
