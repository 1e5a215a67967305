"""What all other packages of the engine use of a model: its configuration, its ops, and the
interface of executors.
"""
