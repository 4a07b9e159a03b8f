"""The optimizer's step that ranks share, each its shard: homes of shards, masters, owners of tensors, checks."""

from .registry import register_elementwise, register_tensorwise

__all__ = ["register_elementwise", "register_tensorwise"]
