"""How fast the engine decodes, beside the memory's bound and other people's engines."""
