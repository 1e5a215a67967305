"""The code that the commands share: arguments, prompts, screens."""
