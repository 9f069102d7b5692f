module kvscaler.io/hack/cluster/probe

go 1.26.0
