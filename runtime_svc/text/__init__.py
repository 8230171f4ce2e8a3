"""Text in and out: tokenizer, chat template, incremental detokenizer, stop strings.

Knows the tokenizer files of a bundle. Must not know requests, slots or gRPC.
"""
