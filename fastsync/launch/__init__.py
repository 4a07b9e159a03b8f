"""From a command to running ranks: torchrun's launcher and Slurm."""
