"""The operator: watches, a work queue, and a level-based reconcile of InferenceServices."""
