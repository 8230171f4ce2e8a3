"""vLLM's engine API, which routers such as SMG speak. The extra `vllm-engine` installs its messages."""
