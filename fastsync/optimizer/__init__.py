"""The optimizer step of attach(optimizer=): each rank steps a shard."""
