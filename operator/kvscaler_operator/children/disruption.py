"""The PodDisruptionBudget: voluntary evictions take one replica at a time."""

from kvscaler_operator.children.intent import Intent, document, selector
from kvscaler_operator.resources import DISRUPTION_BUDGETS, Object


def disruption_budget(intent: Intent) -> Object:
    """One at a time, and never in the way of evicting a Pod that does not work anyway."""
    spec = {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": selector(intent.uid)},
    }
    return document(intent, DISRUPTION_BUDGETS, intent.name, {"spec": spec})
