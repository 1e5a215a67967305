"""What runs a program: the host's threads."""
