"""The ConfigMap with the operator's public keys, from which sidecars know whom to obey."""

from kvscaler_operator.children.intent import Intent, document, keys_config_map_name
from kvscaler_operator.resources import CONFIG_MAPS, Object


def key_map(intent: Intent) -> Object:
    """Public keys by file name; two during a rotation."""
    name = keys_config_map_name(intent.name)
    return document(intent, CONFIG_MAPS, name, {"data": dict(intent.public_keys)})
