"""Kernels to test pipelining with: right ones of every kind, unusual ones, and those that must be refused.

Not here: the passes under test (`tvm_ext.tir_passes.pipelining`).
Start at `kernels.PipeliningKernel`.
"""
