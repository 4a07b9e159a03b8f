"""From a command to running ranks: torchrun's launcher, Ray, Slurm, Kubernetes and SkyPilot."""
