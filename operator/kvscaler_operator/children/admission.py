"""The ConfigMap with what the spec says about admission, from which a starting replica learns it.

Not in the Pod template: there, another bound of a queue would replace every serving Pod. Replicas
that run are told by a PUT; this is for those that start later.
"""

import json

from kvscaler_operator.children.intent import Intent, admission_config_map_name, document
from kvscaler_operator.resources import CONFIG_MAPS, Object

ADMISSION_KEY = "limits.json"


def admission_map(intent: Intent) -> Object:
    """Mode, charge, queue bounds and watermark as the replica's KVSCALER_LIMITS takes them."""
    spec = intent.service.spec
    limits = {
        "mode": spec.admission.mode.value,
        "charge": spec.admission.charge.value,
        "queue_requests": spec.admission.queue.max_requests,
        "max_wait_seconds": spec.admission.queue.max_wait_seconds,
        "watermark_percent": spec.cache.watermark_percent,
    }
    data = {ADMISSION_KEY: json.dumps(limits, sort_keys=True)}
    return document(intent, CONFIG_MAPS, admission_config_map_name(intent.name), {"data": data})
