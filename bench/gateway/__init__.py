"""What a token costs on its way: GenerationService, vLLM's engine API, and SMG in front of that, of one runtime.

    .venv/bin/python -m bench.gateway [--quick]        writes bench/gateway/RESULTS.md

The three take turns on the same deployment, as in `bench`.
"""
