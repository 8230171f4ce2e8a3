"""GPT-J: parallel residual with one norm, neighbours rotated against each other, an output layer with biases."""
