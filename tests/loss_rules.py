"""Rules of a loss by name, that tests of the objective go through."""

from __future__ import annotations

from typing import Any

OPTIONS: dict[str, dict[str, Any]] = {
    "decay": {},
    "exp": {"position_weights": "exp", "depth_scale": 2.0},
    "dpace": {"position_weights": "dpace"},
    "alive": {"alive_prefix": True},
    "dpace-alive": {"position_weights": "dpace", "alive_prefix": True},
    "ce": {"loss": "ce", "position_weights": "dpace"},
    "reverse_kl": {"loss": "reverse_kl"},
    "lk": {"loss": "lk", "lk_eta": 1.0},
    "ce_l1": {"loss": "ce_l1", "alive_prefix": True},
    "positions": {"loss_mean": "positions"},
}
