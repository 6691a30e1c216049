"""What a worker does before its first step: checks, kernels, layout, warm-up, compiling."""
