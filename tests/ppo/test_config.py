"""Settings that cannot work are refused, each with a message that names the setting and the value."""

from __future__ import annotations

from typing import Any

import pytest

from fastsync.ppo.ppo import Settings


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"total_steps": 0}, "total_steps=0 must be at least 1"),
        ({"sync_every": 2}, "sync_every=2 is for weights; set sync to 'diloco' or 'local_sgd', too"),
        ({"hidden_sizes": (64, 0)}, r"hidden_sizes=\(64, 0\) must be widths of at least 1"),
        ({"target_kl": 0.0}, "target_kl=0.0 must be greater than 0"),
        ({"timeout": float("inf")}, "timeout=inf must be a finite number greater than 0"),
        ({"seed": 2**63}, r"seed=9223372036854775808 must be less than 2\*\*63"),
        ({"ent_coef": -0.1}, "ent_coef=-0.1 must not be negative"),
        ({"gamma": float("nan")}, r"gamma=nan must lie in \[0, 1\]"),
        ({"num_envs": 3, "num_steps": 5}, "num_minibatches=4 does not divide the 15 rows of a rank's rollout"),
        ({"num_micro_batches": 5}, "num_micro_batches=5 does not divide the .* rows of a minibatch"),
        ({"lr_schedule": "adaptive"}, "lr_schedule='adaptive' needs the KL divergence to aim at; set target_kl"),
        ({"compression": "fp15"}, "compression"),
    ],
)
def test_bad_settings_are_refused(bad: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Settings(**bad)
