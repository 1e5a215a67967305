"""Finds calls of tools in answers, in the formats of several families of models."""
