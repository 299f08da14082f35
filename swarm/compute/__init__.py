"""Where models run: tasks, the scheduler that forms batches of them, and the thread that runs these."""
