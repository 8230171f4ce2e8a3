"""What SMG costs in front of a runtime: chats that begin at once, by GenerationService and by SMG in turn.

`python -m bench.gateway` writes RESULTS.md here. `WAYS.md` has what a token cost on each way, as it was measured last.
"""
