"""Programs of torch.export as Relax modules: `import_program` is the way, the modules beside it our rules by family.

Operators of neither those nor `stock.TRUSTED` are refused. torch is imported inside functions alone: it is optional.
"""
