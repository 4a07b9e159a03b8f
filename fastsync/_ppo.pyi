# Operators of the trainer: importing the module registers them as torch.ops.fastsync.*.
