"""The rim of every gRPC server of Kiln: TLS, authentication, health, reflection, status rendering, access log, drain.

Knows gRPC and the root of the error tree. Must not know any service of ours, its purpose, or torch.
"""
