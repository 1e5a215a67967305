"""What the commands share: arguments, prompts, screens."""
