"""Training on several GPUs: comparison with one process, and speed and memory."""
