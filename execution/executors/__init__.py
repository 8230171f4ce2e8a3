"""Executors run one executable each, on tensors of one rank: `aoti` compiled libraries, `eager` exported programs.

They hold weights and state, check arguments and know nothing of processes or of other ranks.
"""
