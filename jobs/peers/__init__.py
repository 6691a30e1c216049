"""Other systems' recoveries, measured with the model, steps and kills of jobs/bench_recovery.py."""
