"""Several processes as one engine: tensor, pipeline, expert and context parallelism."""
