"""The base of every other folder: errors, settings, types, checks of arguments, the ABI."""
