"""Any decoder as spans: hollow parents, checkpoints, caches and the manifest."""
