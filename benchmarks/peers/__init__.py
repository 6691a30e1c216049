"""Other systems' recoveries, measured with the model, steps and kills of benchmarks/recovery/bench_recovery.py."""
