"""What `gpu_day` runs: its stages, and the rows that they leave in the folder of the day."""
