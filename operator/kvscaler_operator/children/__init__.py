"""What a service is made of in the cluster: one module per kind, each a pure function to a dict."""
