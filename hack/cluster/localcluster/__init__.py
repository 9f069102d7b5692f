"""A real single-node Kubernetes on this machine, without a container engine or a registry.

Everything that this package starts lives in a sandbox (network, process and mount namespaces), so
that two clusters run side by side and stopping one is a single, complete act.
"""
