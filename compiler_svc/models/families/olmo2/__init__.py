"""OLMo 2: what attention and feed-forward add is normalized, and queries and keys are, all heads as one."""
