"""What tests, benchmarks and examples share: real models, seeded inputs and the timing core of `tvm-ext bench`."""
