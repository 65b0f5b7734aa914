"""What the benchmark scripts share: stored results, counted compiles, engines in miniature."""
