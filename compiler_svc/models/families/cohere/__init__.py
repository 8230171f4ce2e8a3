"""Command R: parallel residual with one norm, neighbours rotated against each other, scaled logits."""
