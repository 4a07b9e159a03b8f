"""The optimizer's step that ranks share, each its shard: homes of shards, masters, checks."""
