"""What every gRPC server of Kiln has at its rim: TLS, health, reflection, status rendering, access log, drain.

Knows gRPC and the root of the error tree. Must not know any service of ours, what it serves, or torch.
"""
