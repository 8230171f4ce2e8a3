"""What a deployment takes, and whether a call is within it: checked before anything is queued. Knows no wire."""
