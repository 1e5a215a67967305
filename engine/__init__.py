"""The engine: real checkpoints decoded on the host, from files to text."""
