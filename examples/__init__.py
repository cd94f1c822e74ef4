"""Training and comparing the models on event data."""
