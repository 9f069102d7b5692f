"""The API kvscaler.io/v1alpha1: models, conditions, reasons and the CRD generator."""
