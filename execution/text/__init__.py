"""Runs what turns text into tokens and back: the tokenizer and the chat template of a bundle or a checkpoint.

Both come from strangers, so they run in a text process, which has limits and can be killed. Only the process imports
jinja2 and tokenizers. Most tokens never reach it on their way back: `token_table` decodes them where they are needed.

Must not know requests, slots, checkpoints or gRPC.
"""
