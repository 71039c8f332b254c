"""Training, and the command line."""
