"""Modules on jagged tokens: attention, pooling, transformer block, event encoder, rotary angles."""

from gemattn.nn.attention import JaggedAttention
from gemattn.nn.block import MLP, JaggedTransformerBlock
from gemattn.nn.encoder import EventEncoder, MaskedFusion, check_ids
from gemattn.nn.pooling import SharedQueryPooling
from gemattn.nn.rotary import apply_rotary, log_age, position_angles, time_angles

__all__ = [
    "MLP",
    "EventEncoder",
    "JaggedAttention",
    "JaggedTransformerBlock",
    "MaskedFusion",
    "SharedQueryPooling",
    "apply_rotary",
    "check_ids",
    "log_age",
    "position_angles",
    "time_angles",
]
