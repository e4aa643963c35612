"""What is learned and scored: data, losses and metrics of each task. Each task is a package of its own."""
