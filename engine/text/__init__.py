"""Tokenizers, chat templates, and what divides an answer into thoughts, text and calls."""
